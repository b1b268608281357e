"""Choose a model's activation thresholds on text, and write them with a profile and a report.

kairox sparsify smollm2-135m --max-loss 0.05 --out checkpoints/smollm2-135m
(also python -m training.thresholds --model smollm2-135m ...)
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from kairox_jax.config import ModelConfig
from kairox_jax.io import Checkpoint, open_checkpoint
from kairox_jax.io.sparsity import Sparsity, fingerprint, save_sparsity
from kairox_jax.models import load_decoder
from training.choose import MOST_STEPS, SENSITIVITY_WINDOWS, Choice, choose_thresholds
from training.forward import LayeredModel, layered
from training.measure import HISTOGRAM_COST, PROFILE_COST, SENSITIVITY_COST, Measurement, evaluate
from training.report import describe, table, write_report
from training.sources import Document, builtin_documents, user_documents
from training.texts import SPLITS, Windows, cut_windows

# What a threshold cuts: |silu(gate) up| for SiLU, the gate for ReLU (then run as FATReLU). Others have none.
RULES = {"silu": "silu", "relu": "fatrelu", "fatrelu": "fatrelu"}


@dataclass(frozen=True)
class Result:
    """What a run found; ``chosen`` and ``equal`` are None where no threshold applies."""

    sparsity: Sparsity
    windows: dict[str, Windows]
    dense: Measurement
    thresholded: Measurement
    baseline: Measurement | None
    chosen: Choice | None
    equal: Choice | None


@dataclass(frozen=True)
class _Thresholded:
    """A checkpoint's weights under another activation."""

    source: Checkpoint
    config: ModelConfig

    def tensor(self, name: str) -> np.ndarray:
        return self.source.tensor(name)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m training.thresholds", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", required=True, help="registered name, path or Hugging Face id")
    parser.add_argument("--out", required=True, type=Path, help="folder for the files")
    parser.add_argument(
        "--max-loss", type=float, default=0.05, help="nats per token on each kind (default 0.05)"
    )
    parser.add_argument(
        "--active-frac", type=float, help="share of the neurons to leave active, in place of --max-loss"
    )
    parser.add_argument("--text", nargs="+", type=Path, default=[], metavar="FILE", help="text of your own")
    parser.add_argument(
        "--text-only", action="store_true", help="leave out the texts of this Python installation"
    )
    parser.add_argument("--windows", type=int, default=16, help="windows of each kind and split (default 16)")
    parser.add_argument(
        "--window", type=int, default=256, metavar="TOKENS", help="tokens of a window (default 256)"
    )
    parser.add_argument("--batch", type=int, default=4, help="windows run at a time (default 4)")
    options = parser.parse_args(arguments)
    check_options(options)
    return options


def check_options(options: argparse.Namespace) -> None:
    """Raise ``ValueError`` for settings that cannot be carried out."""
    if not (np.isfinite(options.max_loss) and options.max_loss > 0):
        raise ValueError(f"--max-loss {options.max_loss} must be above zero: nats per token, such as 0.05")
    if options.active_frac is not None and not 0 < options.active_frac < 1:
        raise ValueError(f"--active-frac {options.active_frac} must lie between 0 and 1, such as 0.3")
    for name, least in (("windows", 2), ("window", 8), ("batch", 1)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name} {getattr(options, name)} must be at least {least}")
    if options.text_only and not options.text:
        raise ValueError("--text-only leaves no text: name files with --text")


def read_windows(options: argparse.Namespace, source: Checkpoint) -> dict[str, Windows]:
    """Cut the windows of every split.

    Raises:
        ValueError: a file cannot be read, or there is too little text.
    """
    documents: list[Document] = user_documents(options.text)
    if not options.text_only:
        documents += builtin_documents()
    tokenizer = source.tokenizer()
    return {
        split: cut_windows(
            documents,
            lambda text: tokenizer.encode(text, add_bos=False),
            split,
            per_kind=options.windows,
            tokens=options.window,
            bos_id=source.config.bos_id if source.config.add_bos else None,
        )
        for split in SPLITS
    }


def run(source: Checkpoint, windows: dict[str, Windows], options: argparse.Namespace) -> Result:
    """Choose thresholds for a model, profile it under them, and measure them on the test split.

    Raises:
        ValueError: too little text, or a loss that is not finite.
    """
    searching = source.config.activation in RULES
    if options.active_frac is not None and not searching:
        raise ValueError(
            f"--active-frac: activation {source.config.activation} takes no threshold; leave it out"
        )
    count = {split: len(w.ids) for split, w in windows.items()}
    total = PROFILE_COST * count["calibration"] + count["test"]
    if searching:
        total += HISTOGRAM_COST * count["calibration"] + 2 * count["test"]
        total += SENSITIVITY_COST * len(windows["calibration"].first(SENSITIVITY_WINDOWS).ids)
        total += (2 + 2 * MOST_STEPS) * count["selection"]
    config = source.config
    if RULES.get(config.activation) == "fatrelu":
        config = replace(config, activation="fatrelu")  # the same function at the model's own threshold
    model = layered(load_decoder(_Thresholded(source, config)))
    with tqdm(total=total, desc="thresholds", unit="window", file=sys.stderr) as bar:
        return _run(source, model, windows, options, bar)


def _run(
    source: Checkpoint,
    model: LayeredModel,
    windows: dict[str, Windows],
    options: argparse.Namespace,
    bar: tqdm,
) -> Result:
    config, batch = source.config, options.batch
    chosen = equal = baseline = None
    if config.activation in RULES:

        def settle(left: int) -> None:
            assert bar.total is not None
            bar.total -= left * len(windows["selection"].ids)

        chosen, equal = choose_thresholds(
            model,
            windows["calibration"],
            windows["selection"],
            max_loss=options.max_loss,
            active_frac=options.active_frac,
            batch=batch,
            tick=bar.update,
            settle=settle,
        )
        thresholds = chosen.thresholds
    else:
        thresholds = np.full(config.num_layers, config.activation_threshold, np.float32)

    def measure(split: str, values: np.ndarray | None, *, losses: bool = True) -> Measurement:
        return evaluate(model, windows[split], values, batch=batch, tick=bar.update, losses=losses)

    profile = measure("calibration", thresholds, losses=False)
    thresholded = measure("test", thresholds)
    dense = thresholded
    if equal is not None:
        dense, baseline = measure("test", None), measure("test", equal.thresholds)
    sparsity = Sparsity(thresholds, profile.frequency(), {})
    return Result(sparsity, windows, dense, thresholded, baseline, chosen, equal)


def execute(options: argparse.Namespace) -> str:
    """Choose, measure and write; return the table of losses.

    Raises:
        ValueError: settings, text or a model that cannot be used.
    """
    start = time.monotonic()
    source = open_checkpoint(options.model)
    windows = read_windows(options, source)
    result = run(source, windows, options)
    meta, report = describe(result, source.config, fingerprint(source), options)
    if result.chosen is not None:
        meta["rule"] = RULES[source.config.activation]
    report["seconds"] = round(time.monotonic() - start, 1)
    save_sparsity(options.out, Sparsity(result.sparsity.thresholds, result.sparsity.frequency, meta))
    write_report(options.out, report)
    return table(report)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m training.thresholds``; return its exit status."""
    try:
        print(execute(parse(arguments)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
