"""One layer's predictor on the host: both products, the estimate of the rest and the choice in one parallel region.

A predictor reads some 100 kB: as calls of their own its products would take longer to begin than to run.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Float
from numba import prange

from kairox_jax.host import crew, loops, rows, threads
from kairox_jax.host.calls import aligned_zeros, read_only
from kairox_jax.host.compile import kernel
from kairox_jax.io.predictors import RMS_EPS, LayerPredictor, Predictors
from kairox_jax.placement.arena import Arena
from kairox_jax.quant import PackedRows

_CHUNK = 32  # rows that a thread takes at a time
STAGES = 6  # the input, first product, hidden units, second product, the rest's product, choice


@kernel(inner=True)
def _prepare(x, normalise, eps, normed, mark, width, inputs):
    """Write the tokens, divided by their root mean square if they are to be, as the first product reads them."""
    for b in range(x.shape[0]):
        factor = np.float32(1)
        if normalise:
            total = np.float32(0)
            for d in range(x.shape[1]):
                total += x[b, d] * x[b, d]
            factor = np.float32(1) / np.float32(math.sqrt(total / x.shape[1] + eps))
        for d in range(x.shape[1]):
            normed[b, d] = x[b, d] * factor
    loops.prepare(normed, mark, width, inputs)


@kernel(inner=True)
def _choose(b, scores, bias, threshold, y, rest_bias, chosen):
    """Compare one token's scores with the threshold, and complete its estimate of the rest."""
    for i in range(chosen.shape[1]):
        score = scores[b, i] + bias[i] if bias.shape[0] > 0 else scores[b, i]
        chosen[b, i] = score >= threshold
    for d in range(rest_bias.shape[0]):
        y[b, d] += rest_bias[d]


@kernel(inner=True)
def forecast_share(
    x, normalise, eps, normed, fc1, fc1_mark, fc1_bias, fc2, fc2_mark, bias, rest, rest_mark, rest_bias, threshold,
    width, inputs, hidden, scores, y, chosen, counters, stage,
):  # fmt: skip
    """One thread's share of a forecast, STAGES stages; returns when all is done."""
    if crew.take(counters, stage) == 0:
        _prepare(x, normalise, eps, normed, fc1_mark, width, inputs)
        crew.finish(counters, stage)
    crew.wait(counters, stage, 1)
    loops.product_share(inputs, x.shape[1], fc1, fc1_mark, width, _CHUNK, hidden, counters, stage + 1)
    if crew.take(counters, stage + 2) == 0:
        for b in range(hidden.shape[0]):
            for r in range(hidden.shape[1]):
                value = hidden[b, r] + fc1_bias[r] if fc1_bias.shape[0] > 0 else hidden[b, r]
                hidden[b, r] = np.float32(0) if value < 0 else value
        loops.prepare(hidden, fc2_mark, width, inputs)
        crew.finish(counters, stage + 2)
    crew.wait(counters, stage + 2, 1)
    loops.product_share(inputs, hidden.shape[1], fc2, fc2_mark, width, _CHUNK, scores, counters, stage + 3)
    loops.product_share(inputs, hidden.shape[1], rest, rest_mark, width, _CHUNK, y, counters, stage + 4)
    b = crew.take(counters, stage + 5)
    while b < hidden.shape[0]:
        _choose(b, scores, bias, threshold, y, rest_bias, chosen)
        crew.finish(counters, stage + 5)
        b = crew.take(counters, stage + 5)
    crew.wait(counters, stage + 5, hidden.shape[0])


@kernel(parallel=True)
def _forecast(
    x, normalise, eps, normed, fc1, fc1_mark, fc1_bias, fc2, fc2_mark, bias, rest, rest_mark, rest_bias, threshold,
    width, inputs, hidden, scores, y, chosen, counters, helpers,
):  # fmt: skip
    crew.clear(counters)
    for _ in prange(helpers):
        forecast_share(
            x, normalise, eps, normed, fc1, fc1_mark, fc1_bias, fc2, fc2_mark, bias, rest, rest_mark, rest_bias,
            threshold, width, inputs, hidden, scores, y, chosen, counters, 0,
        )  # fmt: skip


class HostPredictors:
    """Forecasts from packed rows, with scratch that is shared by all layers.

    Args:
        predictors: of the model.
        batch: the most tokens of a call, 1 to 8.

    Attributes:
        layers: what the loops take of each: (rows, mark, bias) of fc1, fc2 and rest, and the threshold.
        normalise: whether the input is divided by its root mean square.
    """

    def __init__(self, predictors: Predictors, *, batch: int) -> None:
        first = predictors.layers[0]
        neurons, dim = first.fc2.shape[0], first.fc1.shape[1]
        self.normalise = predictors.norm == "rms"
        arena = Arena()
        self.layers = [_arguments(layer, arena) for layer in predictors.layers]
        self._ranks = [layer.fc1.shape[0] for layer in predictors.layers]
        self._has_rest = [layer.rest is not None for layer in predictors.layers]
        widest, width = max(dim, *self._ranks), len(rows.width_of(batch))
        self._inputs = aligned_zeros(rows.prepared_floats(widest, width))
        self._normed = np.empty((batch, dim), np.float32)
        self._hidden = np.empty(batch * max(self._ranks), np.float32)
        self._scores = np.empty((batch, neurons), np.float32)
        self._counters = np.zeros(STAGES * crew.STAGE_BYTES // 8, np.int64)

    def __call__(
        self, layer: int, x: Float[np.ndarray, "n D"]
    ) -> tuple[Bool[np.ndarray, "n F"], Float[np.ndarray, "n D"] | None]:
        """Forecast a layer.

        Args:
            layer: index of the layer whose FFN is forecast.
            x: float32 [n, D], contiguous, as ``Predictors.input`` says, not yet normalised.

        Returns:
            Which neurons each token computes, and what stands in for the others (None: nothing does); fresh arrays.
        """
        n, rank = len(x), self._ranks[layer]
        chosen = np.empty((n, self._scores.shape[1]), np.bool_)
        y = np.empty((n, x.shape[1] if self._has_rest[layer] else 0), np.float32)
        with threads.own() as helpers:
            _forecast(
                read_only(x), self.normalise, np.float32(RMS_EPS), self._normed[:n], *self.layers[layer],
                rows.width_of(n), self._inputs, self._hidden[: n * rank].reshape(n, rank), self._scores[:n], y, chosen,
                self._counters, helpers,
            )  # fmt: skip
        return chosen, y if self._has_rest[layer] else None


def _arguments(layer: LayerPredictor, arena: Arena) -> tuple:
    """Return what the kernel takes of a layer: its rows with their marks and biases, and the threshold."""
    rest = (
        PackedRows(data=np.empty((0, 0), np.uint8), format=layer.fc2.format)
        if layer.rest is None
        else layer.rest
    )
    result: list = []
    for packed, bias in ((layer.fc1, layer.fc1_bias), (layer.fc2, layer.bias), (rest, layer.rest_bias)):
        values = np.empty(0, np.float32) if bias is None else np.array(bias, np.float32)
        result += [arena.keep(packed.data), rows.MARKS[packed.format], read_only(values)]
    return (*result, np.float32(layer.threshold))
