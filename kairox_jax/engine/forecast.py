"""Forecasts inside a decode step: which neurons of a layer's FFN are computed in ``predicted`` mode."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from kairox_jax.engine.programs import Leaves, Rebuild, split_module
from kairox_jax.io.predictors import Predictors
from kairox_jax.models import host_scores, load_predictor


class Forecast(Protocol):
    """Forecasts a layer's active neurons from its predictor's input."""

    predictors: Predictors

    def __call__(self, layer: int, x: Any) -> Any:
        """Return bool [n, F] for x [n, D] (see ``Predictors.input``), on the host or on its way there."""
        ...


class HostForecast:
    """Predictors on the host's kernels, from their packed rows.

    Args:
        predictors: of the model.
        batch: the most sequences in a step.
    """

    def __init__(self, predictors: Predictors, *, batch: int) -> None:
        self.predictors = predictors
        neurons = predictors.layers[0].fc2.shape[0]
        self._scores = np.empty((batch, neurons), np.float32)

    def __call__(self, layer: int, x: Float[np.ndarray, "n D"]) -> Bool[np.ndarray, "n F"]:
        """Return the forecast; x is float32."""
        scores = self._scores[: len(x)]
        host_scores(self.predictors, layer, x, scores)
        return scores >= np.float32(self.predictors.layers[layer].threshold)


class DeviceForecast:
    """Predictors as programs of the JAX device.

    Args:
        predictors: of the model; their weights are unpacked to float32 on the device.
    """

    def __init__(self, predictors: Predictors) -> None:
        self.predictors = predictors
        splits = [split_module(load_predictor(part, predictors.norm)) for part in predictors.layers]
        self._leaves = [split.leaves for split in splits]
        self._run = _score_program(splits[0].rebuild)

    def __call__(self, layer: int, x: Float[Array, "n D"]) -> Bool[Array, "n F"]:
        """Return the forecast, on its way to the host."""
        chosen = self._run(self._leaves[layer], np.float32(self.predictors.layers[layer].threshold), x)
        chosen.copy_to_host_async()
        return chosen


def _score_program(rebuild: Rebuild) -> Any:
    """Compile ``(leaves, threshold [], x [n,D]) -> chosen [n,F]``."""

    def run(leaves: Leaves, threshold: Array, x: Array) -> Array:
        return rebuild(leaves)(x) >= threshold

    return jax.jit(run)


def predictor_bytes(predictors: Predictors | None) -> int:
    """Return the bytes that the predictors take on an accelerator, unpacked to float32."""
    if predictors is None:
        return 0
    sizes = [
        4 * (np.prod(part.fc1.shape) + np.prod(part.fc2.shape) + sum(part.fc2.shape))
        for part in predictors.layers
    ]
    return int(sum(sizes))
