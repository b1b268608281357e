"""A training run, kept in a work folder so that a killed one goes on: activations, ranks, fits, thresholds."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from kairox_jax.io.predictor_file import pack_rows
from kairox_jax.io.predictors import LayerPredictor, Predictors
from kairox_jax.io.sparsity import fingerprint
from kairox_jax.models import Decoder, find_predictors, load_decoder
from kairox_jax.quant import PackedRows
from training.evaluate import Mode, run_modes
from training.evaluate_figures import layer_figures, mode_figures, row_sizes
from training.forward import LayeredModel, layered
from training.predictor_choose import MOST_RANK, RANK_STEP, choose_ranks
from training.predictor_data import READS, Activations, collect, decode_square, neuron_weights, write_json
from training.predictor_distil import DistilSettings, distil
from training.predictor_fit import PROBE_TOKENS, FitSettings, Fitted, Start, fit_layer, regress
from training.predictor_report import FIT_FIGURES
from training.predictor_thresholds import FAMILIES, Choice, choose_thresholds, model_thresholds
from training.predictor_time import forecast_ms_per_layer
from training.sources import KINDS
from training.texts import Windows

DENSE_UNIT_SHARE = 0.5  # the unit of contributions is the value that this share of them exceeds
ACTIVE_UNIT_SHARE = 0.98  # the same among the active neurons of a model that is sparse by itself
WEIGHT_WINDOWS = 4  # of each kind: a backward pass costs four forward ones


def pack(fitted: Fitted, threshold: float) -> LayerPredictor:
    """Round a trained predictor to rows: Q8_0 and Q4_0, or float16 where the width is no multiple of 32.

    What was trained end to end was rounded to Q4_0 while it was trained: rounding again changes nothing.
    """
    fc1 = pack_rows(fitted.fc1, first_format(fitted.fc1.shape[1], fitted.rest is not None))
    # What rounding does to the mean input is a constant: the bias takes it.
    shift = (fitted.fc1 - fc1.dequantize()) @ fitted.mean

    def half(values: np.ndarray) -> np.ndarray:
        return values.astype(np.float16).astype(np.float32)

    return LayerPredictor(
        fc1=fc1,
        fc2=pack_rows(fitted.fc2, "q4_0"),
        fc1_bias=half(fitted.fc1_bias + shift),
        bias=half(fitted.bias),
        threshold=threshold,
        rest=None if fitted.rest is None else pack_rows(fitted.rest, "q4_0"),
        rest_bias=None if fitted.rest_bias is None else half(fitted.rest_bias),
    )


def first_format(d_model: int, distilled: bool) -> str:
    """Return the format of the first matrix."""
    return "f16" if d_model % 32 else "q4_0" if distilled else "q8_0"


def unit_bytes(d_model: int, num_neurons: int, distilled: bool) -> int:
    """Return the bytes that 32 hidden units take in ``pack``'s formats."""
    block = {"f16": 64, "q8_0": 34, "q4_0": 18}[first_format(d_model, distilled)]
    rest = d_model * 18 if distilled else 0
    return RANK_STEP * (d_model * block // 32) + num_neurons * 18 + rest + 2 * RANK_STEP


class Trainer:
    """A run: what it has done is in the work folder, so that another run goes on from there."""

    def __init__(self, source: Any, windows: dict[str, Windows], options: argparse.Namespace) -> None:
        self.source, self.windows, self.options = source, windows, options
        self.config = source.config
        self.given = None if options.start is None else find_predictors(source, options.start)
        if options.input is None:
            options.input = "adjacent" if self.given is None else self.given.input
        self.work: Path = options.out / "predictors.work" if options.work is None else Path(options.work)
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
            *("distil_steps", "distil_batch", "distil_rate", "distil_every", "distil_shares", "products"),
            "input",
        )
        ids = [hashlib.sha256(w.ids.tobytes()).hexdigest() for w in self.windows.values()]
        facts = {
            "model": fingerprint(self.source),
            "text": ids,
            **{n: getattr(self.options, n) for n in names},
        }
        if self.given is not None:
            facts["start"] = _digest(self.given)
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
        decoder = self.decoder = load_decoder(self.source)
        if self.options.start is not None:
            train, held = self._outputs(layered(decoder))
            fitted, scales = self._given(held)
            choice = self._choose(decoder, fitted, held, np.zeros(len(fitted)), FAMILIES[1:2])
        else:
            train, held, weights = self._activations(layered(decoder))
            starts = [self._start(train, weights, layer) for layer in range(self.config.num_layers)]
            fitted = self._fit(train, held, weights, starts, self._ranks(starts))
            scales = [start.scale for start, _ in starts]
            choice = self._choose(decoder, fitted, held, np.log([unit for _, unit in starts]), FAMILIES)
        if self.options.distil_steps:
            fitted = self._distil(layered(decoder), fitted, scales, choice, train, held)
            # All scores are of one price now: their thresholds move together.
            choice = self._choose(decoder, fitted, held, np.zeros(len(fitted)), FAMILIES[1:2])
        layers = tuple(pack(part, float(cut)) for part, cut in zip(fitted, choice.thresholds, strict=True))
        return Predictors(layers=layers, input=self.options.input, norm="rms"), choice, fitted

    def _choose(
        self,
        decoder: Decoder,
        fitted: list[Fitted],
        held: Activations,
        offsets: np.ndarray,
        families: tuple[str, ...],
    ) -> Choice:
        return choose_thresholds(
            decoder,
            [pack(part, 0.0) for part in fitted],
            held,
            offsets,
            self.windows["selection"],
            model_thresholds(self.source),
            self.options,
            families,
        )

    def _distil(
        self,
        model: LayeredModel,
        fitted: list[Fitted],
        scales: list[np.ndarray],
        choice: Choice,
        train: Activations,
        held: Activations,
    ) -> list[Fitted]:
        """Train all layers together, and keep the result."""
        o, files = self.options, [self.work / f"distilled-{layer:03}.npz" for layer in range(len(fitted))]
        if not files[-1].exists():  # written last
            shares: dict[str, float] = dict.fromkeys(KINDS, float(np.mean(choice.shares)))
            shares.update(o.distil_shares or {})
            settings = DistilSettings(
                steps=o.distil_steps, batch=o.distil_batch, rate=o.distil_rate, every=o.distil_every,
                patience=o.patience, seed=o.seed, shares=shares, products=o.products,
                reads=o.input,
            )  # fmt: skip
            with tqdm(total=o.distil_steps, desc="end to end", unit="step", file=sys.stderr) as bar:

                def tick(steps: int, figures: str) -> None:
                    bar.set_postfix_str(figures, refresh=False)
                    bar.update(steps)

                found = distil(
                    model, fitted, scales, choice.thresholds,
                    train=(self.windows["calibration"], train.outputs()),
                    held=(self.windows["selection"], held.outputs()),
                    settings=settings, folder=self.work / "distil", tick=tick,
                )  # fmt: skip
            for file, part in zip(files, found.layers, strict=True):
                _save_fitted(file, part._replace(figures=part.figures | {"distilled": found.figures}))
        return [_load_fitted(file) for file in files]

    def test(self, predictors: Predictors) -> dict[str, Any]:
        """Measure the predictors on the test split, which nothing was chosen on."""
        above, windows = model_thresholds(self.source), self.windows["test"]
        modes = [
            Mode(name="dense", rule="dense"),
            Mode(name="predicted", rule="predicted", predictors=predictors),
        ]
        if above is not None:
            modes.insert(1, Mode(name="exact", rule="active"))
        with tqdm(total=len(modes) * len(windows.ids), desc="test", unit="window", file=sys.stderr) as bar:
            outcomes = run_modes(
                self.decoder, windows, modes, active_above=above, batch=self.options.batch, tick=bar.update
            )
        sizes = row_sizes(self.source)
        figures = {
            mode.name: mode_figures(mode, outcome, outcomes[0], windows, sizes)
            for mode, outcome in zip(modes, outcomes, strict=True)
        }
        return {
            "forecast_ms_per_layer": forecast_ms_per_layer(predictors),
            "modes": figures,
            "layer_figures": layer_figures(outcomes[-1], windows, self.config.num_neurons),
        }

    def _activations(self, model: LayeredModel) -> tuple[Activations, Activations, np.ndarray]:
        calibration, selection = self.windows["calibration"], self.windows["selection"]
        some = calibration.first(WEIGHT_WINDOWS)
        total = len(calibration.ids) + len(selection.ids) + len(some.ids)
        with tqdm(total=total, desc="activations", unit="window", file=sys.stderr) as bar:
            batch, reads = self.options.batch, self.options.input
            train = collect(
                model, calibration, self.work / "train", batch=batch, tick=bar.update, reads=reads
            )
            held = collect(model, selection, self.work / "held", batch=batch, tick=bar.update, reads=reads)
            file = self.work / "weights.npy"
            if not file.exists():
                weights = neuron_weights(model, some, batch=batch, tick=bar.update)
                np.save(file.with_name("weights.tmp.npy"), weights)
                file.with_name("weights.tmp.npy").replace(file)
        return train, held, np.load(file)

    def _outputs(self, model: LayeredModel) -> tuple[Activations, Activations]:
        """Collect what training all layers together reads, and the held-out text whole, for thresholds."""
        calibration, selection = self.windows["calibration"], self.windows["selection"]
        total = len(calibration.ids) + len(selection.ids)
        with tqdm(total=total, desc="outputs", unit="window", file=sys.stderr) as bar:
            batch, reads = self.options.batch, self.options.input
            train = collect(
                model, calibration, self.work / "train", batch=batch, tick=bar.update, reads=reads,
                outputs_only=True,
            )  # fmt: skip
            held = collect(model, selection, self.work / "held", batch=batch, tick=bar.update, reads=reads)
        return train, held

    def _given(self, held: Activations) -> tuple[list[Fitted], list[np.ndarray]]:
        """Return the predictors to go on from as trained ones, and the deviation of each layer's input."""
        assert self.given is not None
        if self.given.input not in READS or self.given.norm != "rms":
            raise ValueError(
                f"--start {self.options.start}: predictors with input {self.given.input} and norm {self.given.norm} "
                "cannot go on: train new ones"
            )
        fitted, scales = [], []
        for layer, part in enumerate(self.given.layers):
            x = held.inputs(layer).astype(np.float32)
            fitted.append(
                Fitted(
                    fc1=part.fc1.dequantize(),
                    fc1_bias=_or_zeros(part.fc1_bias, part.fc1),
                    fc2=part.fc2.dequantize(),
                    bias=_or_zeros(part.bias, part.fc2) - np.float32(part.threshold),
                    mean=x.mean(0),
                    figures=_fit_figures(self.given, layer),
                    rest=None if part.rest is None else part.rest.dequantize(),
                    rest_bias=part.rest_bias,
                )
            )
            scales.append(x.std(0) + 1e-6)
        return fitted, scales

    def _start(self, train: Activations, weights: np.ndarray, layer: int) -> tuple[Start, float]:
        """Return where a layer's training begins, and its unit of contributions; from the work folder if there."""
        file = self.work / f"start-{layer:03}.npz"
        if file.exists():
            with np.load(file, allow_pickle=False) as content:
                return Start(*(content[name] for name in Start._fields)), float(content["unit"])
        x, codes = train.inputs(layer), train.sizes(layer)
        rows = np.sort(np.random.default_rng(layer).permutation(len(x))[:PROBE_TOKENS])
        w = np.asarray(decode_square(jnp.asarray(codes[rows]))) * weights[layer].astype(np.float32)
        unit = float(np.quantile(w[:: max(1, len(rows) // 512)], 1 - DENSE_UNIT_SHARE))
        if self.config.activation != "silu" or unit <= 0:
            positive = w[w > 0]
            if not positive.size:
                raise ValueError(
                    f"no neuron of layer {layer} is active on the text: the model or the text is broken"
                )
            unit = float(np.quantile(positive, 1 - ACTIVE_UNIT_SHARE))
        start = regress(x[rows].astype(np.float32), w / np.float32(unit), MOST_RANK)
        unfinished = file.with_name(file.stem + ".tmp.npz")
        np.savez(unfinished, unit=unit, **start._asdict())
        unfinished.replace(file)
        return start, unit

    def _ranks(self, starts: list[tuple[Start, float]]) -> list[int]:
        config = self.config
        biases = config.num_neurons + (config.d_model if self.options.distil_steps else 0)
        fixed = 2 * biases * config.num_layers
        budget = int(self.options.bytes * row_sizes(self.source).dense) - fixed
        scales = np.array([unit for _, unit in starts])
        return choose_ranks(
            [start.gains for start, _ in starts],
            scales,
            unit_bytes(config.d_model, config.num_neurons, self.options.distil_steps > 0),
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


def _digest(predictors: Predictors) -> str:
    """Return a hash of every layer's rows and threshold."""
    digest = hashlib.sha256()
    for layer in predictors.layers:
        for packed in (layer.fc1, layer.fc2, *(() if layer.rest is None else (layer.rest,))):
            digest.update(packed.data.tobytes())
        digest.update(np.float64(layer.threshold).tobytes())
    return digest.hexdigest()


def _or_zeros(bias: np.ndarray | None, rows: PackedRows) -> np.ndarray:
    return np.zeros(rows.shape[0], np.float32) if bias is None else bias


def _fit_figures(given: Predictors, layer: int) -> dict[str, Any]:
    """Return what the given predictors' file says about the fit of a layer, and its rank."""
    known = given.meta.get("layers")
    figures = known[layer] if isinstance(known, list) and len(known) == len(given.layers) else {}
    own = {name: figures[name] for name in FIT_FIGURES if name in figures}
    return own | {"rank": given.layers[layer].fc1.shape[0]}


def _save_fitted(file: Path, fitted: Fitted) -> None:
    unfinished = file.with_name(file.stem + ".tmp.npz")
    content = {name: value for name, value in fitted._asdict().items() if value is not None}
    content["figures"] = np.array(json.dumps(content["figures"]))
    np.savez(unfinished, **content)
    unfinished.replace(file)


def _load_fitted(file: Path) -> Fitted:
    with np.load(file, allow_pickle=False) as content:
        parts: dict[str, Any] = {name: content[name] for name in Fitted._fields if name in content}
    parts["figures"] = json.loads(str(parts["figures"]))
    return Fitted(**parts)
