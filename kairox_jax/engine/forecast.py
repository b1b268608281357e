"""Forecasts inside a decode step: which neurons of a layer's FFN are computed in ``predicted`` mode."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from kairox_jax.engine.programs import Leaves, Rebuild, split_module
from kairox_jax.host import HostPredictors
from kairox_jax.io.predictors import Predictors
from kairox_jax.models import load_predictor


class Forecasted(NamedTuple):
    """What is known of a layer's FFN before it runs; on the host, or on its way there.

    Attributes:
        chosen: which neurons each token computes, bool [n, F].
        rest: what stands in for the others, float32 [n, D]; None for nothing.
    """

    chosen: Any
    rest: Any

    def on_host(self) -> Forecasted:
        """Return it as NumPy arrays."""
        return Forecasted(np.asarray(self.chosen), None if self.rest is None else np.asarray(self.rest))

    def share(self) -> Bool[np.ndarray, " F"] | Float[np.ndarray, " F"]:
        """Return what a policy sees of the choices of n sequences; on the host."""
        return self.chosen[0] if len(self.chosen) == 1 else self.chosen.mean(axis=0, dtype=np.float32)


class Forecast(Protocol):
    """Forecasts a layer's active neurons from its predictor's input."""

    predictors: Predictors

    def __call__(self, layer: int, x: Any) -> Forecasted:
        """Return the forecast for x [n, D] (see ``Predictors.input``)."""
        ...


class HostForecast:
    """Predictors on the host's kernels, from their packed rows.

    Args:
        predictors: of the model.
        batch: the most sequences in a step.

    Attributes:
        run: the compiled predictors.
    """

    def __init__(self, predictors: Predictors, *, batch: int) -> None:
        self.predictors = predictors
        self.run = HostPredictors(predictors, batch=batch)

    def __call__(self, layer: int, x: Float[np.ndarray, "n D"]) -> Forecasted:
        """Return the forecast, fresh arrays; x is float32."""
        return Forecasted(*self.run(layer, np.ascontiguousarray(x)))


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

    def __call__(self, layer: int, x: Float[Array, "n D"]) -> Forecasted:
        """Return the forecast, on its way to the host."""
        limit = np.float32(self.predictors.layers[layer].threshold)
        forecast = Forecasted(*self._run(self._leaves[layer], limit, x))
        for array in forecast:
            if array is not None:
                array.copy_to_host_async()
        return forecast


def _score_program(rebuild: Rebuild) -> Any:
    """Compile ``(leaves, threshold [], x [n,D]) -> chosen [n,F], rest [n,D] or None``."""

    def run(leaves: Leaves, threshold: Array, x: Array) -> tuple[Array, Array | None]:
        scores, rest = rebuild(leaves).both(x)
        return scores >= threshold, rest

    return jax.jit(run)


def predictor_bytes(predictors: Predictors | None) -> int:
    """Return the bytes that the predictors take on an accelerator, unpacked to float32."""
    if predictors is None:
        return 0
    total = 0
    for part in predictors.layers:
        rows = [part.fc1, part.fc2, *([] if part.rest is None else [part.rest])]
        total += sum(int(np.prod(packed.shape)) + packed.shape[0] for packed in rows)
    return 4 * total
