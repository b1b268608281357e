"""`kairox convert`: write a model as an Orbax folder or a GGUF file, and compare the result with its source."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kairox_jax.commands.flags import Flag, add_flags

SAMPLE = (
    "The lighthouse keeper wrote down the weather every evening: wind from the west, a falling barometer, "
    "and far out at sea the lights of three ships that did not come nearer."
)
SAMPLE_TOKENS = 32
_LINES = 10  # of progress, where standard error is no terminal


def _one_of(*words: str) -> Any:
    def convert(text: str) -> str:
        if text not in words:
            raise ValueError(f"{text!r} is not one of {', '.join(words)}")
        return text

    return convert


FLAGS = (
    Flag(
        dest="to",
        names=("--to",),
        metavar="orbax|gguf",
        convert=_one_of("orbax", "gguf"),
        help="what to write; gguf where DST ends in .gguf, else orbax",
    ),
    Flag(
        dest="quantize",
        names=("--quantize",),
        metavar="q8_0|q4_0|f16|f32|keep",
        convert=_one_of("keep", "f32", "f16", "q8_0", "q4_0"),
        default="keep",
        help="the format of matrices; keep leaves the source's rows as they are",
    ),
    Flag(
        dest="sparsity",
        names=("--sparsity",),
        metavar="FOLDER",
        help="thresholds, profile and predictors that go along; the model's own or the shipped ones where not given",
    ),
    Flag(dest="force", names=("--force",), help="replace DST where it exists"),
    Flag(dest="json", names=("--json",), help="print the closing figures as one JSON object"),
    Flag(dest="quiet", names=("--quiet",), help="no progress on standard error"),
    Flag(dest="debug", names=("--debug",), help="show the traceback of an error"),
)


def add_to(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "convert",
        help="write a model as an Orbax folder or a GGUF file",
        description="Convert a model, then compare the result with its source on a sample of 32 tokens. A run that "
        "was broken off goes on when it is started again.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a name for 'kairox pull', a file or folder, or a Hugging Face repository",
    )
    parser.add_argument("target", metavar="DST", help="a folder, or a file that ends in .gguf")
    add_flags(parser, {"conversion": FLAGS})
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, engine_api: Any | None = None) -> int:
    """Convert and print the closing line; return 0."""
    del engine_api
    from kairox_jax.io import open_checkpoint
    from kairox_jax.io.convert import Conversion, convert
    from kairox_jax.models import find_sparsity

    target = Path(args.target).expanduser()
    if args.to == "orbax" and target.suffix == ".gguf":
        raise ValueError(
            f"{target}: --to orbax writes a folder, this names a GGUF file: leave out --to, or the ending"
        )
    source = open_checkpoint(args.source)
    with _Progress(quiet=args.quiet, name=target.name) as progress:
        job = Conversion(
            source=source,
            target=target,
            kind=args.to or ("gguf" if target.suffix == ".gguf" else "orbax"),
            quantize=args.quantize,
            sparsity=find_sparsity(source, args.sparsity),
            predictors=_predictors(source, args.sparsity),
            force=args.force,
        )
        convert(job, note=progress.note, report=progress.update)
    facts = compare(source, open_checkpoint(target))
    print(json.dumps(facts) if args.json else closing_line(facts))
    return 0


def compare(source: Any, result: Any) -> dict[str, Any]:
    """Compare a converted checkpoint with its source, layer by layer.

    Returns:
        ``path``, ``parameters``, ``bytes``, ``activation``, ``active_frac`` on the sample (None where every neuron
        of a SiLU model counts), ``parity`` (largest difference of a logit over the largest |logit|), ``sample``
        (``text``, or ``random ids`` where there is no tokenizer) and ``sample_tokens``.
    """
    import numpy as np

    from kairox_jax.models import find_sparsity, resolve_thresholds, streamed_logits

    ids, sample = _sample_ids(source)
    want, _ = streamed_logits(source, ids)
    config, thresholds = result.config, None
    got, share = streamed_logits(result, ids)
    active: float | None = share
    if config.activation == "silu":
        sparsity = find_sparsity(result, None)
        active = None
        if sparsity is not None:
            thresholds = resolve_thresholds(config, sparsity)
            _, active = streamed_logits(result, ids, thresholds=thresholds)
    return {
        "path": str(result.path),
        "parameters": sum(int(np.prod(result.shape(name))) for name in result.names()),
        "bytes": result.num_bytes,
        "activation": config.activation,
        "active_frac": active,
        "parity": float(np.abs(got - want).max() / np.abs(want).max()),
        "sample": sample,
        "sample_tokens": int(ids.size),
    }


def closing_line(facts: dict[str, Any]) -> str:
    """Lay the figures out as one line."""
    active = facts["active_frac"]
    share = "all neurons count" if active is None else f"{active:.1%} of the neurons active"
    return (
        f"{facts['path']}: {facts['parameters'] / 1e6:.1f} M parameters, {facts['bytes'] / 1e6:.1f} MB, "
        f"{facts['activation']}, {share}; largest logit difference from the source {facts['parity']:.2e} of the "
        f"largest |logit| on {facts['sample_tokens']} tokens ({facts['sample']})"
    )


def _sample_ids(source: Any) -> tuple[Any, str]:
    """Return the sample's token ids [1, T]: a text, or random ids where there is no tokenizer."""
    import numpy as np

    from kairox_jax.io import FormatError

    count = min(SAMPLE_TOKENS, source.config.context_length)
    try:
        ids, sample = source.tokenizer().encode(SAMPLE)[:count], "text"
    except FormatError:
        ids, sample = np.random.default_rng(0).integers(0, source.config.vocab_size, count), "random ids"
    return np.asarray(ids, np.int32)[None], sample


def _predictors(source: Any, folder: str | None) -> Path | None:
    """Return the predictors' file that lies beside the thresholds in use."""
    from kairox_jax.io.convert import PREDICTORS
    from kairox_jax.io.sparsity import shipped_folder

    if folder is not None:
        own: Path | None = Path(folder)
    else:
        own = source.path if source.own_sparsity() is not None else shipped_folder(source)
    file = None if own is None else own / PREDICTORS
    return file if file is not None and file.is_file() else None


class _Progress:
    """A bar on a terminal, else a line at every tenth of the way; on standard error."""

    def __init__(self, *, quiet: bool, name: str) -> None:
        self._quiet, self._name, self._bar, self._tenths = quiet, name, None, 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def note(self, line: str) -> None:
        """Say something in a line of its own."""
        if not self._quiet:
            print(f"kairox: {line}", file=sys.stderr, flush=True)

    def update(self, written: int, total: int) -> None:
        """Show how many bytes are written."""
        if self._quiet:
            return
        if sys.stderr.isatty():
            if self._bar is None:
                from tqdm import tqdm

                self._bar = tqdm(
                    total=total, desc=self._name, unit="B", unit_scale=True, file=sys.stderr, leave=False
                )
            self._bar.update(written - self._bar.n)
        elif (tenths := written * _LINES // max(1, total)) > self._tenths:
            self._tenths = tenths
            digits = 0 if total >= 100e6 else 1 if total >= 1e6 else 3
            self.note(f"{self._name}: {written / 1e6:.{digits}f} of {total / 1e6:.{digits}f} MB written")
