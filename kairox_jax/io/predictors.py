"""Activation predictors: which neurons of each FFN are forecast, from what is known before it runs.

Owns ``predictors.safetensors``, which lies beside ``thresholds.json``, and finds the shipped one. The training
command `kairox train-predictors` makes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from kairox_jax.io.errors import FormatError
from kairox_jax.io.predictor_file import read_meta, read_tensors, write_file
from kairox_jax.io.sparsity import SHIPPED, TensorSource, fingerprint
from kairox_jax.quant import PackedRows

FORMAT = 1
FILE = "predictors.safetensors"
REMEDY = "make them again with `kairox train-predictors`"
INPUTS = ("adjacent", "own", "layer_input")
NORMS = ("none", "rms")
RMS_EPS = 1e-5


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerPredictor:
    """One layer's predictor: score = fc2 hidden + bias, with hidden = relu(fc1 x + fc1_bias).

    Attributes:
        fc1: R rows of D weights.
        fc2: F rows of R weights.
        fc1_bias: float32 [R], or None for zero.
        bias: float32 [F], or None for zero.
        threshold: neuron i is predicted where its score is at least this.
        rest: D rows of R weights: rest hidden + rest_bias stands in for what the neurons that are not predicted
            would add to the FFN's output. None adds nothing.
        rest_bias: float32 [D]; None exactly where ``rest`` is.
    """

    fc1: PackedRows
    fc2: PackedRows
    fc1_bias: Float[np.ndarray, " R"] | None = None
    bias: Float[np.ndarray, " F"] | None = None
    threshold: float = 0.0
    rest: PackedRows | None = None
    rest_bias: Float[np.ndarray, " D"] | None = None

    def __post_init__(self) -> None:
        (rank, dim), (neurons, width) = self.fc1.shape, self.fc2.shape
        if width != rank:
            raise ValueError(f"fc2 reads {width} hidden units, fc1 gives {rank}: {REMEDY}")
        if (self.rest is None) != (self.rest_bias is None):
            raise ValueError(f"a predictor has one of rest and rest_bias, expected both or none: {REMEDY}")
        if self.rest is not None and self.rest.shape != (dim, rank):
            raise ValueError(f"predictor rest has shape {self.rest.shape}, expected {(dim, rank)}: {REMEDY}")
        vectors = (("fc1_bias", self.fc1_bias, rank), ("bias", self.bias, neurons))
        for name, values, num in (*vectors, ("rest_bias", self.rest_bias, dim)):
            if values is not None and values.shape != (num,):
                raise ValueError(f"predictor {name} has shape {values.shape}, expected ({num},): {REMEDY}")
        if not np.isfinite(self.threshold):
            raise ValueError(f"predictor threshold {self.threshold} must be finite: {REMEDY}")

    @property
    def nbytes(self) -> int:
        """Bytes that one forecast reads: its matrices, and the biases as float16."""
        biases = [0 if b is None else 2 * len(b) for b in (self.fc1_bias, self.bias, self.rest_bias)]
        rest = 0 if self.rest is None else self.rest.nbytes
        return self.fc1.nbytes + self.fc2.nbytes + rest + sum(biases)

    @cached_property
    def weights(self) -> tuple[Float[np.ndarray, "R D"], Float[np.ndarray, "F R"]]:
        """fc1 and fc2, unpacked once."""
        return self.fc1.dequantize(), self.fc2.dequantize()


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictors:
    """One predictor a layer, and what they read.

    Attributes:
        layers: L of them; the rank R may differ.
        input: what x of layer l is, always without the model's own norms applied:
            ``adjacent``: the residual stream after the attention of layer l - 1 was added to it (for l >= 1;
            neither the FFN of layer l - 1 nor anything of layer l is in it), and for layer 0 the residual
            stream after the attention of layer 0; ``own``: the residual stream after the attention of layer l
            was added; ``layer_input``: the residual stream that enters layer l.
        norm: done to x first: ``none``, or ``rms``: x / sqrt(mean(x^2) + 1e-5).
        meta: facts for people and checks: model, fingerprint, training figures, command, versions.
    """

    layers: tuple[LayerPredictor, ...]
    input: str
    norm: str = "none"
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.input not in INPUTS:
            raise ValueError(f"predictor input {self.input!r} is not one of {', '.join(INPUTS)}: {REMEDY}")
        if self.norm not in NORMS:
            raise ValueError(f"predictor norm {self.norm!r} is not one of {', '.join(NORMS)}: {REMEDY}")
        if not self.layers:
            raise ValueError(f"there is no predictor: {REMEDY}")
        sizes = {(layer.fc1.shape[1], layer.fc2.shape[0]) for layer in self.layers}
        if len(sizes) > 1:
            raise ValueError(f"predictors of several sizes (width, neurons) {sorted(sizes)}: {REMEDY}")
        if len({layer.rest is None for layer in self.layers}) > 1:
            raise ValueError(
                f"some predictors estimate the rest and some do not, expected all or none: {REMEDY}"
            )

    @property
    def thresholds(self) -> Float[np.ndarray, " L"]:
        """Thresholds on the score, float32 [L]."""
        return np.array([layer.threshold for layer in self.layers], np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes that all forecasts of one token read."""
        return sum(layer.nbytes for layer in self.layers)

    def predict(self, layer: int, x: Float[np.ndarray, "B D"]) -> Float[np.ndarray, "B F"]:
        """Return the scores of a layer's neurons; NumPy, for checks and small uses.

        Args:
            layer: index of the layer whose FFN is forecast.
            x: float32 [B, D], as ``input`` says, not yet normalised.

        Returns:
            float32 [B, F]; neuron i is predicted where ``score >= layers[layer].threshold``.

        Source: PowerInfer (arXiv 2312.12456) section 5.1 for the form.
        """
        predictor = self.layers[layer]
        score = self._hidden(layer, x) @ predictor.weights[1].T
        return score if predictor.bias is None else score + predictor.bias

    def estimate_rest(self, layer: int, x: Float[np.ndarray, "B D"]) -> Float[np.ndarray, "B D"]:
        """Return what stands in for the neurons that are not predicted; zeros where nothing does. As ``predict``."""
        predictor = self.layers[layer]
        if predictor.rest is None or predictor.rest_bias is None:
            return np.zeros_like(x)
        return self._hidden(layer, x) @ predictor.rest.dequantize().T + predictor.rest_bias

    def _hidden(self, layer: int, x: Float[np.ndarray, "B D"]) -> Float[np.ndarray, "B R"]:
        predictor = self.layers[layer]
        hidden = normalise_input(x, self.norm) @ predictor.weights[0].T
        return np.maximum(hidden if predictor.fc1_bias is None else hidden + predictor.fc1_bias, 0)

    def predicted(self, layer: int, x: Float[np.ndarray, "B D"]) -> Bool[np.ndarray, "B F"]:
        """Return which neurons are forecast to matter."""
        return self.predict(layer, x) >= np.float32(self.layers[layer].threshold)


def normalise_input(x: Float[np.ndarray, "B D"], norm: str) -> Float[np.ndarray, "B D"]:
    """Return x as the first matrix takes it."""
    if norm == "none":
        return x
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(RMS_EPS))


def check_predictors(predictors: Predictors, source: TensorSource) -> None:
    """Check that predictors were made for this model.

    Raises:
        ValueError: another number of layers, neurons, or width, or another fingerprint.
    """
    config, made_for = source.config, predictors.meta.get("model", "another model")
    first = predictors.layers[0]
    got = (len(predictors.layers), first.fc2.shape[0], first.fc1.shape[1])
    want = (config.num_layers, config.num_neurons, config.d_model)
    if got != want:
        raise ValueError(
            f"the predictors of {made_for} are for {got[0]} layers of {got[1]} neurons and width {got[2]}, this "
            f"model has {want[0]} of {want[1]} and width {want[2]}: {REMEDY}"
        )
    if predictors.meta.get("fingerprint") != fingerprint(source):
        raise ValueError(f"the predictors were made for {made_for}, not for this model: {REMEDY}")


def save_predictors(folder: str | Path, predictors: Predictors) -> Path:
    """Write ``predictors.safetensors`` into a folder; return its path.

    Raises:
        ValueError: ``meta`` lacks the fingerprint.
    """
    if "fingerprint" not in predictors.meta:
        raise ValueError(
            "the predictors' meta lacks 'fingerprint': a reader could not tell which model they fit"
        )
    tensors: dict[str, np.ndarray] = {}
    formats: list[dict[str, str]] = []
    for index, layer in enumerate(predictors.layers):
        rows = {"fc1": layer.fc1, "fc2": layer.fc2} | ({} if layer.rest is None else {"rest": layer.rest})
        formats.append({name: packed.format for name, packed in rows.items()})
        tensors |= {f"layers.{index}.{name}": packed.data for name, packed in rows.items()}
        for name in ("fc1_bias", "bias", "rest_bias"):
            if (values := getattr(layer, name)) is not None:
                tensors[f"layers.{index}.{name}"] = np.asarray(values, np.float16)
    meta = {
        "format": FORMAT,
        "num_layers": len(predictors.layers),
        "input": predictors.input,
        "norm": predictors.norm,
        "thresholds": [float(str(value)) for value in predictors.thresholds],
        "formats": formats,
        **predictors.meta,
    }
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, tensors, meta)
    return path


def load_predictors(folder: str | Path) -> Predictors:
    """Read predictors from a folder or a file.

    Raises:
        ValueError: the file is missing, damaged, of an unknown format, or its parts do not agree.
    """
    path = Path(folder) / FILE if Path(folder).is_dir() else Path(folder)
    if not path.is_file():
        raise ValueError(f"there is no {path}: make predictors with `kairox train-predictors`")
    meta, tensors = read_meta(path), read_tensors(path)
    if meta.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}: {REMEDY}")
    try:
        count, formats, thresholds = (meta.pop(key) for key in ("num_layers", "formats", "thresholds"))
        if not count == len(formats) == len(thresholds):
            told = f"{count} layers, {len(formats)} with formats, {len(thresholds)} with thresholds"
            raise FormatError(path, "metadata", f"{told}: {REMEDY}")
        layers = tuple(_layer(tensors, i, formats[i], float(thresholds[i])) for i in range(count))
        return Predictors(layers=layers, input=meta.pop("input"), norm=meta.pop("norm"), meta=meta)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise FormatError(path, "metadata", f"lacks {error}: {REMEDY}") from None


def _layer(
    tensors: dict[str, np.ndarray], index: int, formats: dict[str, str], threshold: float
) -> LayerPredictor:
    def floats(name: str) -> np.ndarray | None:
        values = tensors.get(f"layers.{index}.{name}")
        return None if values is None else values.astype(np.float32)

    def rows(name: str) -> PackedRows:
        packed = PackedRows(data=tensors[f"layers.{index}.{name}"], format=formats[name])
        if not np.isfinite(packed.dequantize()).all():
            raise ValueError(f"layers.{index}.{name} of the predictors holds NaN or infinity: {REMEDY}")
        return packed

    return LayerPredictor(
        fc1=rows("fc1"),
        fc2=rows("fc2"),
        fc1_bias=floats("fc1_bias"),
        bias=floats("bias"),
        threshold=threshold,
        rest=rows("rest") if "rest" in formats else None,
        rest_bias=floats("rest_bias"),
    )


def shipped_predictors(source: TensorSource, folder: str | Path = SHIPPED) -> Predictors | None:
    """Return the predictors shipped for a model, or None where none are.

    Args:
        source: an open checkpoint.
        folder: holds one folder a model.
    """
    files = sorted(Path(folder).glob(f"*/{FILE}"))
    if not files:
        return None
    wanted = fingerprint(source)
    for file in files:
        if read_meta(file).get("fingerprint") == wanted:
            predictors = load_predictors(file)
            check_predictors(predictors, source)
            return predictors
    return None
