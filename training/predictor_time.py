"""How long a forecast of one token takes, on the host's kernels and as a program of the JAX device."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax
import numpy as np

from kairox_jax.engine.forecast import DeviceForecast, HostForecast
from kairox_jax.io.predictors import Predictors

WARM_UP, REPEATS = 3, 30


def forecast_ms_per_layer(predictors: Predictors) -> dict[str, float]:
    """Return the median time of a forecast, milliseconds, mean over the layers.

    ``host``: packed rows on the host's kernels, all their threads; ``jax``: float32 on the default JAX device,
    with the transfer of x to it and of the result back.
    """
    host, device = HostForecast(predictors, batch=1), DeviceForecast(predictors)
    x = np.random.default_rng(0).normal(size=(1, predictors.layers[0].fc1.shape[1])).astype(np.float32)
    layers = range(len(predictors.layers))

    def median_ms(run: Callable[[int], Any]) -> float:
        return float(np.mean([_median_s(lambda layer=layer: run(layer)) for layer in layers])) * 1e3

    return {
        "host": round(median_ms(lambda layer: host(layer, x)), 4),
        "jax": round(median_ms(lambda layer: device(layer, jax.device_put(x)).on_host()), 4),
    }


def _median_s(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(WARM_UP + REPEATS):
        begin = perf_counter()
        run()
        times.append(perf_counter() - begin)
    return float(np.median(times[WARM_UP:]))
