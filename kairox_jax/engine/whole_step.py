"""Steps where the host computes every neuron, or every one that is forecast: one call runs all layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from kairox_jax.engine.counts import Pass
from kairox_jax.engine.dense_part import DeviceDense
from kairox_jax.engine.forecast import Forecast, HostForecast
from kairox_jax.engine.host_dense import HostDense
from kairox_jax.host import HostStep, LayerFfn, StepForecast, StepLayer


class WholeStep:
    """Passes through all layers by the host's kernels, without Python between two layers.

    Args:
        dense: the dense part.
        ffns: of each layer.
        forecast: on the host too; None where every neuron is computed.
    """

    def __init__(
        self, dense: HostDense, ffns: Sequence[LayerFfn], *, forecast: HostForecast | None = None
    ) -> None:
        self._dense, config = dense, dense.config
        layers = [
            StepLayer(
                attention=dense.weights[layer],
                keys=dense.keys[layer],
                values=dense.values[layer],
                ffn=ffn,
                added=None if dense.down_biases is None else dense.down_biases[layer],
            )
            for layer, ffn in enumerate(ffns)
        ]
        chooses = None
        if forecast is not None:
            chooses = StepForecast(forecast.run, ahead=forecast.predictors.input == "adjacent")
        self._run = HostStep(config, layers, activations=dense.activations, forecast=chooses)
        self._is_forecast = forecast is not None
        self._shape = config.num_layers, config.num_neurons

    def __call__(
        self, ids: Int[np.ndarray, " n"], start: Int[np.ndarray, " n"], rows: Int[np.ndarray, " n"]
    ) -> Pass:
        """Run one token of each of n sequences; arguments as for ``Hybrid.step``."""
        (num_layers, neurons), n = self._shape, len(ids)
        x = self._dense.embed(ids[:, None], start)[:, 0]
        y, zero = np.empty_like(x), np.zeros_like(x)
        fired = np.empty((num_layers, n, neurons), np.uint8)
        cos, sin = self._dense.turned(0, start)
        (front_ms, ffn_ms), counts = self._run(
            x, y, fired, cache_rows=rows, positions=start, cos=cos, sin=sin
        )
        return Pass(
            users=fired[:, 0] if n == 1 else fired.sum(axis=1, dtype=np.uint8),
            masks=[None] * num_layers,
            gpu_ms=front_ms.tolist(),
            cpu_ms=ffn_ms.tolist(),
            evaluated=int(counts.sum()) if self._is_forecast else num_layers * neurons,
            predicted=int(counts.sum()) if self._is_forecast else 0,
            logits=self._dense.logits(x, zero, y),
        )


def whole_step(
    dense: DeviceDense | HostDense, ffns: Sequence[LayerFfn], forecast: Forecast | None
) -> WholeStep | None:
    """Return what runs a model without slots, or None where not all is on the host or forecasts precede attention."""
    if not isinstance(dense, HostDense):
        return None
    if forecast is None:
        return WholeStep(dense, ffns)
    if not isinstance(forecast, HostForecast) or forecast.predictors.input == "layer_input":
        return None
    return WholeStep(dense, ffns, forecast=forecast) if StepForecast.can_run(forecast.run) else None
