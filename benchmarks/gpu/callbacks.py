"""Host callbacks: latency of each backend with host work of given lengths, and how far it overlaps device work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.settings import Settings, TimeBox
from benchmarks.gpu.timing import median_s, one_line
from kairox_jax.config import HOST_CALLBACKS
from kairox_jax.engine.jitted_step import beside
from kairox_jax.host import Rule
from kairox_jax.host.callback import HostFfn, HostNeurons, host_ffn
from kairox_jax.placement import NeuronStore
from kairox_jax.quant import RecordLayout

DEVICE_PRODUCTS = 8  # of the device's own work, one after another


def run(settings: Settings, box: TimeBox) -> dict[str, Any]:
    """Return one row for each backend and length of host work."""
    neurons = random_neurons(*settings.callback_shape)
    per_neuron_us = _us_per_neuron(neurons)
    platform = jax.default_backend()
    rows, cut = [], False
    for backend in HOST_CALLBACKS:
        for work_us in settings.work_us:
            if box.over:
                cut = True
                continue
            n = min(round(work_us / per_neuron_us), settings.callback_shape[0])
            row: dict[str, Any] = {"backend": backend, "work_us": work_us, "neurons": n}
            try:
                row |= measure(neurons, backend, n, platform, settings.repeats)
            except Exception as error:  # a backend that does not run here is a result
                row["failed"] = one_line(error)
            rows.append(row)
    return {"platform": platform, "us_per_neuron": per_neuron_us, "rows": rows, "cut": cut}


def random_neurons(num_neurons: int, width: int) -> HostNeurons:
    """Return one layer of random float32 neurons, about half of them active."""
    layout = RecordLayout(num_elems=width, formats=("f32", "f32", "f32"))
    weights = np.random.default_rng(0).normal(size=(num_neurons, 3 * width)).astype(np.float32) * width**-0.5
    records = np.zeros((num_neurons, layout.record_bytes), np.uint8)
    records[:, : 12 * width] = weights.view(np.uint8)
    store = NeuronStore(layouts=(layout,), layers=(records,), scales=(None,))
    return HostNeurons(store=store, rule=Rule.RELU, thresholds=np.zeros(1, np.float32))


def measure(neurons: HostNeurons, backend: str, n: int, platform: str, repeats: int) -> dict[str, float]:
    """Return microseconds of the callback alone, the device's work alone, and both, and the share that overlaps.

    The share is what both save over one after the other, of the most that they could save.
    """
    call = host_ffn(neurons, backend, platform=platform)
    run = _split_step if backend == "split" else _jitted_step
    alone, device, both = (median_s(f, repeats) * 1e6 for f in run(call, neurons, n, platform))
    saved = alone + device - both
    return {
        "callback_us": alone,
        "device_us": device,
        "both_us": both,
        "overlap_frac": saved / min(alone, device),
    }


def _inputs(neurons: HostNeurons, n: int) -> tuple[Any, Any, np.ndarray, np.int32]:
    records = neurons.store.layers[0]
    x = jnp.asarray(
        np.random.default_rng(1).normal(size=(1, neurons.store.layouts[0].num_elems)), jnp.float32
    )
    w = jnp.eye(x.shape[1], dtype=jnp.float32)
    ids = np.random.default_rng(2).permutation(len(records)).astype(np.int32)
    return x, w, ids, np.int32(n)


def _device_work(x: Any, w: Any) -> Any:
    for _ in range(DEVICE_PRODUCTS):
        x = jnp.tanh(x @ w)
    return x


def _jitted_step(
    call: HostFfn, neurons: HostNeurons, n: int, platform: str
) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]:
    x, w, ids, count = _inputs(neurons, n)
    work = beside(_device_work) if platform == "gpu" else _device_work

    def together(x: Any, w: Any) -> Any:
        return work(x, w) + call(x, ids, count, np.int32(0))[0]

    host = jax.jit(lambda x: call(x, ids, count, np.int32(0))[0])
    device, both = jax.jit(_device_work), jax.jit(together)
    return lambda: host(x), lambda: device(x, w), lambda: both(x, w)


def _split_step(
    call: HostFfn, neurons: HostNeurons, n: int, platform: str
) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]:
    """As the engine does: dispatch the device's work, compute on the calling thread, merge in a small program."""
    x, w, ids, count = _inputs(neurons, n)
    device, merge = jax.jit(_device_work), jax.jit(jnp.add)

    def host() -> Any:
        return merge(x, call(np.asarray(x), ids, count, 0)[0])

    def both() -> Any:
        y = device(x, w)
        return merge(y, call(np.asarray(x), ids, count, 0)[0])

    return host, lambda: device(x, w), both


def _us_per_neuron(neurons: HostNeurons) -> float:
    """Return what one more neuron costs the host's kernels."""
    call, (x, _, ids, _) = host_ffn(neurons, "split"), _inputs(neurons, 0)
    x, many = np.asarray(x), len(ids)
    few = median_s(lambda: call(x, ids, many // 4, 0)[0], 5)
    most = median_s(lambda: call(x, ids, many, 0)[0], 5)
    return max((most - few) * 1e6 / (many - many // 4), 1e-3)
