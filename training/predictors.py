"""Command: train a predictor for each layer of a model on text, and write them with a report and a plot.

python -m training.predictors --model smollm2-135m --out checkpoints/smollm2-135m
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kairox_jax.io import Checkpoint, open_checkpoint
from kairox_jax.io.predictor_file import pack_rows
from kairox_jax.io.predictors import FILE, LayerPredictor, Predictors, save_predictors
from kairox_jax.io.sparsity import fingerprint
from kairox_jax.models import load_decoder
from training.forward import LayeredModel, layered
from training.predictor_choose import RANK_STEP, choose_ranks
from training.predictor_data import Activations, collect, decode_square, neuron_weights, write_json
from training.predictor_fit import PROBE_TOKENS, FitSettings, Fitted, Start, fit_layer, regress
from training.predictor_report import describe, plot, table
from training.predictor_thresholds import Choice, choose_thresholds, model_thresholds
from training.sources import Document, builtin_documents, user_documents
from training.texts import SPLITS, Windows, cut_windows

DENSE_UNIT_SHARE = 0.5  # the unit of contributions is the value that this share of them exceeds
ACTIVE_UNIT_SHARE = 0.98  # the same among the active neurons of a model that is sparse by itself
WEIGHT_WINDOWS = 4  # of each kind: a backward pass costs four forward ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, all but the model."""
    parser.add_argument("--out", required=True, type=Path, help="folder for the files")
    parser.add_argument(
        "--work", type=Path, help="folder for activations and checkpoints (default OUT/predictors.work)"
    )
    parser.add_argument("--text", nargs="+", type=Path, default=[], metavar="FILE", help="text of your own")
    parser.add_argument(
        "--text-only", action="store_true", help="leave out the texts of this Python installation"
    )
    parser.add_argument("--windows", type=int, default=80, help="training windows of each kind (default 80)")
    parser.add_argument("--held", type=int, default=8, help="held-out windows of each kind (default 8)")
    parser.add_argument(
        "--window", type=int, default=256, metavar="TOKENS", help="tokens of a window (default 256)"
    )
    parser.add_argument("--batch", type=int, default=4, help="windows run at a time (default 4)")
    parser.add_argument("--steps", type=int, default=400, help="most training steps a layer (default 400)")
    parser.add_argument(
        "--fit-batch", type=int, default=1024, help="tokens of a training step (default 1024)"
    )
    parser.add_argument("--rate", type=float, default=3e-3, help="AdamW's step size (default 3e-3)")
    parser.add_argument(
        "--every", type=int, default=50, help="steps between held-out losses and checkpoints (default 50)"
    )
    parser.add_argument(
        "--patience", type=int, default=3, help="held-out losses without a new best (default 3)"
    )
    parser.add_argument(
        "--bytes",
        type=float,
        default=0.06,
        help="share of the FFN's bytes that predictors may take (default 0.06)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of the tokens (default 0)")
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--share", type=float, help="of the neurons that are touched on held-out text (default 0.54)"
    )
    target.add_argument("--recall", type=float, help="by contribution, in each layer on held-out text")
    target.add_argument(
        "--max-loss", type=float, help="nats per token over dense on each kind of held-out text"
    )


def check(options: argparse.Namespace) -> None:
    """Check the options' values.

    Raises:
        ValueError: one is out of range.
    """
    least = {
        "windows": 1,
        "held": 1,
        "window": 8,
        "batch": 1,
        "steps": 1,
        "fit_batch": 1,
        "every": 1,
        "patience": 1,
        "seed": 0,
    }
    for name, limit in least.items():
        if getattr(options, name) < limit:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least {limit}")
    if not (np.isfinite(options.rate) and options.rate > 0):
        raise ValueError(f"--rate {options.rate} must be above zero, such as 3e-3")
    for name in ("bytes", "share", "recall"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1:
            raise ValueError(f"--{name} {value} must be between 0 and 1")
    if options.max_loss is not None and not (np.isfinite(options.max_loss) and options.max_loss > 0):
        raise ValueError(f"--max-loss {options.max_loss} must be above zero: nats per token, such as 0.1")
    if options.text_only and not options.text:
        raise ValueError("--text-only leaves no text: name files with --text")
    if options.share is None and options.recall is None and options.max_loss is None:
        options.share = 0.54


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
            per_kind=options.windows if split == "calibration" else options.held,
            tokens=options.window,
            bos_id=source.config.bos_id if source.config.add_bos else None,
        )
        for split in SPLITS
    }


def ffn_bytes(source: Any) -> int:
    """Return the bytes of all neurons, every row in the format of the file's gate and up rows."""
    config = source.config
    packed = source.packed("layers.0.w_up")
    row = 4 * config.d_model if packed is None else packed.data.shape[1]
    return config.num_layers * config.num_neurons * row * (3 if config.gated else 2)


def pack(fitted: Fitted, threshold: float) -> LayerPredictor:
    """Round a trained predictor to rows: Q8_0 and Q4_0, or float16 where the width is no multiple of 32."""
    blocks = fitted.fc1.shape[1] % 32 == 0
    fc1 = pack_rows(fitted.fc1, "q8_0" if blocks else "f16")
    # What rounding does to the mean input is a constant: the bias takes it.
    shift = (fitted.fc1 - fc1.dequantize()) @ fitted.mean
    half = [b.astype(np.float16).astype(np.float32) for b in (fitted.fc1_bias + shift, fitted.bias)]
    return LayerPredictor(
        fc1=fc1, fc2=pack_rows(fitted.fc2, "q4_0"), fc1_bias=half[0], bias=half[1], threshold=threshold
    )


def unit_bytes(d_model: int, num_neurons: int) -> int:
    """Return the bytes that 32 hidden units take in ``pack``'s formats."""
    fc1 = RANK_STEP * (d_model * 34 // 32 if d_model % 32 == 0 else 2 * d_model)
    return fc1 + num_neurons * 18 + 2 * RANK_STEP


class Trainer:
    """A run: what it has done is in the work folder, so that another run goes on from there."""

    def __init__(self, source: Any, windows: dict[str, Windows], options: argparse.Namespace) -> None:
        self.source, self.windows, self.options = source, windows, options
        self.config = source.config
        self.work: Path = options.out / "predictors.work" if options.work is None else options.work
        if self.config.norm != "rmsnorm" or self.config.positions != "rotary":
            raise ValueError(
                f"the model has {self.config.norm} and {self.config.positions} positions: predictors are trained for "
                "models with RMS norm and rotary positions only"
            )
        self._claim()

    def _claim(self) -> None:
        """Mark the work folder with what decides its content; refuse one of another run."""
        names = (
            "windows",
            "held",
            "window",
            "batch",
            "steps",
            "fit_batch",
            "rate",
            "every",
            "patience",
            "bytes",
            "seed",
        )
        ids = [hashlib.sha256(w.ids.tobytes()).hexdigest() for w in self.windows.values()]
        facts = {
            "model": fingerprint(self.source),
            "text": ids,
            **{n: getattr(self.options, n) for n in names},
        }
        file = self.work / "run.json"
        if not file.exists():
            self.work.mkdir(parents=True, exist_ok=True)
            write_json(file, facts)
        elif (before := json.loads(file.read_text())) != facts:
            other = [name for name in facts if before.get(name) != facts[name]]
            raise ValueError(
                f"{self.work} holds a run with another {', '.join(other)}: remove it, or give another --work"
            )

    def run(self) -> tuple[Predictors, Choice, list[Fitted]]:
        """Do what is not done yet, then choose thresholds."""
        decoder = load_decoder(self.source)
        train, held, weights = self._activations(layered(decoder))
        starts = [self._start(train, weights, layer) for layer in range(self.config.num_layers)]
        ranks = self._ranks(starts)
        fitted = self._fit(train, held, weights, starts, ranks)
        packed = [pack(part, 0.0) for part in fitted]
        offsets = np.log([unit for _, unit in starts])
        choice = choose_thresholds(
            decoder,
            packed,
            held,
            offsets,
            self.windows["selection"],
            model_thresholds(self.source),
            self.options,
        )
        layers = tuple(pack(part, float(cut)) for part, cut in zip(fitted, choice.thresholds, strict=True))
        return Predictors(layers=layers, input="adjacent", norm="rms"), choice, fitted

    def _activations(self, model: LayeredModel) -> tuple[Activations, Activations, np.ndarray]:
        calibration, selection = self.windows["calibration"], self.windows["selection"]
        some = calibration.first(WEIGHT_WINDOWS)
        total = len(calibration.ids) + len(selection.ids) + len(some.ids)
        with tqdm(total=total, desc="activations", unit="window", file=sys.stderr) as bar:
            batch = self.options.batch
            train = collect(model, calibration, self.work / "train", batch=batch, tick=bar.update)
            held = collect(model, selection, self.work / "held", batch=batch, tick=bar.update)
            file = self.work / "weights.npy"
            if not file.exists():
                weights = neuron_weights(model, some, batch=batch, tick=bar.update)
                np.save(file.with_name("weights.tmp.npy"), weights)
                file.with_name("weights.tmp.npy").replace(file)
        return train, held, np.load(file)

    def _start(self, train: Activations, weights: np.ndarray, layer: int) -> tuple[Start, float]:
        """Return where a layer's training begins, and its unit of contributions."""
        x, codes = train.inputs(layer), train.sizes(layer)
        rows = np.sort(np.random.default_rng(layer).permutation(len(x))[:PROBE_TOKENS])
        w = np.asarray(decode_square(codes[rows])) * weights[layer].astype(np.float32)
        share = self.options.share if self.options.share is not None else DENSE_UNIT_SHARE
        unit = float(np.quantile(w[:: max(1, len(rows) // 512)], 1 - share))
        if self.config.activation != "silu" or unit <= 0:
            positive = w[w > 0]
            if not positive.size:
                raise ValueError(
                    f"no neuron of layer {layer} is active on the text: the model or the text is broken"
                )
            unit = float(np.quantile(positive, 1 - ACTIVE_UNIT_SHARE))
        most = max(RANK_STEP, 128)
        return regress(x[rows].astype(np.float32), w / np.float32(unit), most), unit

    def _ranks(self, starts: list[tuple[Start, float]]) -> list[int]:
        config = self.config
        fixed = 2 * config.num_neurons * config.num_layers  # biases
        budget = int(self.options.bytes * ffn_bytes(self.source)) - fixed
        scales = np.array([unit for _, unit in starts])
        return choose_ranks(
            [start.gains for start, _ in starts],
            scales,
            unit_bytes(config.d_model, config.num_neurons),
            budget,
        )

    def _fit(
        self,
        train: Activations,
        held: Activations,
        weights: np.ndarray,
        starts: list[tuple[Start, float]],
        ranks: list[int],
    ) -> list[Fitted]:
        o = self.options
        settings = FitSettings(
            steps=o.steps, batch=o.fit_batch, rate=o.rate, every=o.every, patience=o.patience, seed=o.seed
        )
        result = []
        with tqdm(total=len(ranks) * o.steps, desc="predictors", unit="step", file=sys.stderr) as bar:
            for layer, ((start, unit), rank) in enumerate(zip(starts, ranks, strict=True)):
                file = self.work / f"fit-{layer:03}.npz"
                if not file.exists():
                    done = 0

                    def tick(steps: int, loss: float, layer: int = layer) -> None:
                        nonlocal done
                        done += steps
                        bar.set_postfix(layer=layer, loss=f"{loss:.4f}", refresh=False)
                        bar.update(steps)

                    found = fit_layer(
                        train.inputs(layer), train.sizes(layer), held.inputs(layer), held.sizes(layer),
                        unit=weights[layer] / unit, start=start, rank=rank, layer=layer, settings=settings,
                        folder=self.work / f"layer-{layer:03}", tick=tick,
                    )  # fmt: skip
                    _save_fitted(file, found)
                    shutil.rmtree(self.work / f"layer-{layer:03}", ignore_errors=True)
                    bar.update(o.steps - done)
                else:
                    bar.update(o.steps)
                result.append(_load_fitted(file))
        return result


def _save_fitted(file: Path, fitted: Fitted) -> None:
    unfinished = file.with_name(file.stem + ".tmp.npz")
    content = fitted._asdict()
    content["figures"] = np.array(json.dumps(content["figures"]))
    np.savez(unfinished, **content)
    unfinished.replace(file)


def _load_fitted(file: Path) -> Fitted:
    with np.load(file, allow_pickle=False) as content:
        parts = {name: content[name] for name in Fitted._fields}
    parts["figures"] = json.loads(str(parts["figures"]))
    return Fitted(**parts)


def train(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train predictors for a model and write all files; return the report.

    Raises:
        ValueError: an option, a text or the model does not do.
    """
    begin = time.monotonic()
    check(options)
    source = open_checkpoint(name)
    windows = read_windows(options, source)
    trainer = Trainer(source, windows, options)
    predictors, choice, fitted = trainer.run()
    meta, report = describe(predictors, choice, fitted, source, windows, name, options)
    report["seconds"] = round(time.monotonic() - begin, 1)
    save_predictors(options.out, replace(predictors, meta=meta))
    write_json(options.out / "predictors_report.json", report)
    plot(report, options.out / "predictors_report.png")
    shutil.rmtree(trainer.work)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m training.predictors", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", required=True, help="registered name, path or Hugging Face id")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        report = train(options.model, options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(report))
    print(f"wrote {options.out / FILE}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
