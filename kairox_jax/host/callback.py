"""The host's share of an FFN behind one function, ``(x, ids, n, layer) -> y, active``, in four forms.

``split`` is plain Python on NumPy arrays: the caller overlaps it with the device. The others are called inside a jit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jaxtyping import Float, Int32, UInt8

from kairox_jax.config import HOST_CALLBACKS
from kairox_jax.host import ffi_handler
from kairox_jax.host.kernels import residual_ffn
from kairox_jax.host.rules import Rule
from kairox_jax.host.threads import thread_count
from kairox_jax.placement import NeuronStore

HostFfn = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class HostNeurons:
    """What the host evaluates.

    Attributes:
        store: every neuron's record.
        rule: activation.
        thresholds: of each layer, float32 [L].
    """

    store: NeuronStore
    rule: Rule
    thresholds: Float[np.ndarray, " L"]

    def evaluate(
        self,
        x: Float[np.ndarray, "B D"],
        ids: Int32[np.ndarray, " K"],
        n: int,
        layer: int,
        y: Float[np.ndarray, "B D"],
        active: UInt8[np.ndarray, "B K"],
    ) -> None:
        """Write the sum of the first n neurons of ids into y, and which of them were active (0 after the n-th)."""
        biases = None if self.store.biases is None else self.store.biases[layer]
        active[:, n:] = 0
        residual_ffn(
            x, self.store.layers[layer], biases, ids, n, self.rule, float(self.thresholds[layer]), y, active,
            layout=self.store.layouts[layer], scales=self.store.scales[layer],
        )  # fmt: skip


def host_ffn(neurons: HostNeurons, backend: str, *, platform: str = "cpu") -> HostFfn:
    """Return the function ``(x, ids, n, layer) -> y, active`` of one backend.

    x is float32 [B, D], ids int32 [K] of which the first n count, n and layer int32 scalars; y is float32 [B, D],
    active uint8 [B, K]. Costs: docs/gpu.md.

    Args:
        neurons: what it evaluates; must not change while programs that call it live.
        backend: one of ``HOST_CALLBACKS``. "split" takes and gives NumPy arrays; inside a jit: "pure"
            (``jax.pure_callback``, any platform), "buffer" (``buffer_callback``) and "ffi" (a compiled XLA handler).
        platform: where the surrounding program runs.

    Raises:
        ValueError: unknown backend, or one that does not run on the platform.
    """
    check_backend(backend, platform)
    make = {"split": _split, "pure": _pure, "buffer": _buffer, "ffi": _ffi}[backend]
    return make(neurons)


def check_backend(backend: str, platform: str) -> None:
    """Raise ``ValueError`` for an unknown backend, or one that does not run on the platform."""
    if backend not in HOST_CALLBACKS:
        raise ValueError(f"host callback {backend!r} is unknown: use one of {', '.join(HOST_CALLBACKS)}")
    if backend in ("buffer", "ffi") and platform != "cpu":
        raise ValueError(
            f"host callback {backend!r} reads host memory and runs on JAX's CPU backend only, not on {platform}: "
            "use 'split' or 'pure'"
        )


def _split(neurons: HostNeurons) -> HostFfn:
    def call(x: Any, ids: Any, n: Any, layer: Any) -> tuple[np.ndarray, np.ndarray]:
        x, ids = np.array(x), np.array(ids)  # writable copies: kernels for read-only arrays would be others
        y, active = np.empty(x.shape, np.float32), np.empty((len(x), len(ids)), np.uint8)
        neurons.evaluate(x, ids, int(n), int(layer), y, active)
        return y, active

    return call


def _results(x: Any, ids: Any) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return (
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        jax.ShapeDtypeStruct((x.shape[0], ids.shape[0]), jnp.uint8),
    )


def _pure(neurons: HostNeurons) -> HostFfn:
    split = _split(neurons)

    def call(x: Any, ids: Any, n: Any, layer: Any) -> tuple[Any, Any]:
        return jax.pure_callback(split, _results(x, ids), x, ids, n, layer, vmap_method="sequential")

    return call


def _buffer(neurons: HostNeurons) -> HostFfn:
    def work(context: Any, out: Any, x: Any, ids: Any, n: Any, layer: Any) -> None:
        y, active = (np.asarray(buffer) for buffer in out)
        neurons.evaluate(
            np.asarray(x), np.asarray(ids), int(np.asarray(n)), int(np.asarray(layer)), y, active
        )

    def call(x: Any, ids: Any, n: Any, layer: Any) -> tuple[Any, Any]:
        return buffer_callback(work, _results(x, ids))(x, ids, n, layer)

    return call


def _ffi(neurons: HostNeurons) -> HostFfn:
    names = [ffi_handler.register(layout.formats[0], layout.formats[-1]) for layout in neurons.store.layouts]
    handlers = sorted(set(names))  # a handler for each pair of formats, and layers may differ
    which = np.array([handlers.index(name) for name in names], np.int32)
    places = np.ascontiguousarray(_table(neurons)).view(np.uint8).reshape(-1)
    limits = np.ascontiguousarray(neurons.thresholds, np.float32)

    def call(x: Any, ids: Any, n: Any, layer: Any) -> tuple[Any, Any]:
        runs = [jax.ffi.ffi_call(name, _results(x, ids)) for name in handlers]
        arguments = x, ids, jnp.int32(n), jnp.int32(layer), jnp.asarray(places), jnp.asarray(limits)
        if len(runs) == 1:
            y, active = runs[0](*arguments)
        else:
            y, active = jax.lax.switch(jnp.asarray(which)[layer], runs, *arguments)
        return y, active

    call.neurons = neurons  # type: ignore[attr-defined]  # the handler reads their memory by address
    return call


def _table(neurons: HostNeurons) -> np.ndarray:
    """Return where each layer's neurons are, as ``ffi_handler`` reads it, int64 [L, COLUMNS]."""
    store, f = neurons.store, ffi_handler
    table = np.zeros((len(store.layers), f.COLUMNS), np.int64)
    for layer, records in enumerate(store.layers):
        table[layer, f.RECORDS] = records.ctypes.data
        table[layer, f.NEURONS], table[layer, f.RECORD_BYTES] = records.shape
        layout, scales = store.layouts[layer], store.scales[layer]
        table[layer, f.GATED], table[layer, f.ROW_BYTES] = len(layout.formats) == 3, layout.row_bytes[0]
        if scales is not None:
            table[layer, f.SCALES], table[layer, f.GROUPS] = scales.scales.ctypes.data, len(scales.scales)
            table[layer, f.MINIMA] = 0 if scales.minima is None else scales.minima.ctypes.data
        if store.biases is not None:
            table[layer, f.BIASES] = store.biases[layer].ctypes.data
            table[layer, f.BIAS_COLUMNS] = store.biases[layer].shape[1]
    table[:, f.RULE], table[:, f.THREADS] = int(neurons.rule), thread_count()
    return table
