"""One layer of a hybrid decode step as one program: front, residents, the host's part by a callback, merge.

On CUDA XLA starts the host first and the residents after it, unless these run on a second stream. That compiles to an
overlapped order with plain-XLA kernels (jax 0.12.0); with Pallas kernels XLA's compiler crashes there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import compute_on
from jax.extend.core import Literal
from jaxtyping import Array, Bool, Float, UInt8

from kairox_jax.host.callback import HostFfn
from kairox_jax.models import KVCache

RESIDENT_STREAM = "gpu_stream:1"
# Primitives that call another program, and the parameter that holds it.
_INSIDE = {"pjit": "jaxpr", "jit": "jaxpr", "custom_jvp_call": "call_jaxpr"}


class LayerResult(NamedTuple):
    """What a layer's program gives.

    Attributes:
        x: residual stream after the layer.
        cache: the layer's cache, donated.
        hits: slots whose neurons were active, or None where none was valid.
        fired: which of the host's neurons were active.
    """

    x: Float[Array, "B D"]
    cache: KVCache
    hits: Bool[Array, "B C"] | None
    fired: UInt8[Array, "B K"]


def beside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a part of a program for CUDA run on a second stream."""
    wrap: Any = getattr(compute_on, "compute_on2", None) or compute_on.compute_on  # renamed after jax 0.10
    return wrap(_inlined(function), compute_type=RESIDENT_STREAM, out_memory_spaces=jax.memory.Space.Device)


def _inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without jits inside: XLA's compiler (jax 0.12.0) crashes on a call in a second stream."""

    def call(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def _evaluate(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Bind every operation of a jaxpr anew, and those inside its jits in their place."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))
    for equation in jaxpr.eqns:
        inputs = [v.val if isinstance(v, Literal) else values[v] for v in equation.invars]
        inner = equation.params.get(_INSIDE.get(equation.primitive.name))
        if inner is not None:
            results = _evaluate(inner.jaxpr, inner.consts, inputs)
        else:
            results = equation.primitive.bind(*inputs, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def layer_program(
    front: Callable[..., tuple[Any, Any, Any]],
    resident: Callable[..., tuple[Any, Any]],
    host: HostFfn,
    *,
    second_stream: bool,
) -> Callable[..., LayerResult]:
    """Compile ``(weights, x [B,D], start [B], rows, cache, residents, ids, n [], layer [], attend) -> LayerResult``.

    Args:
        front: ``programs.front_program``: merges, attends, normalises.
        resident: ``programs.resident_program``.
        host: ``host.callback.host_ffn`` of a backend that runs inside a jit.
        second_stream: run the residents on a second stream (CUDA, plain-XLA kernels).

    Returns:
        The program. ``weights`` are the front's leaves and norm, and the down bias [D] or None; ``rows`` as for
        the front; ``residents`` the resident program's arguments before h, or None where no slot is valid; the
        first n of ``ids`` [K] are evaluated on the host.
    """

    def joined(*residents: Any) -> Array:
        # One output: with two XLA awaits the residents before it calls the host.
        y_device, hits = resident(*residents)
        return jnp.concatenate([y_device, hits.astype(y_device.dtype)], axis=1)

    aside = beside(joined) if second_stream else joined

    def run(
        weights: tuple[Any, Any, Array | None],
        x: Array,
        start: Array,
        rows: Array | None,
        cache: KVCache,
        residents: tuple[Any, ...] | None,
        ids: Array,
        n: Array,
        layer: Array,
        attend: int,
    ) -> LayerResult:
        leaves, norm, down_bias = weights
        nothing = jnp.zeros_like(x)
        x, h, cache = front(leaves, norm, x, nothing, nothing, start, rows, cache, attend)
        y_device, hits = nothing, None
        if residents is not None:
            both = aside(*residents, h)
            y_device, hits = both[:, : x.shape[1]], both[:, x.shape[1] :] != 0
        y_host, fired = host(h, ids, n, layer)
        if down_bias is not None:
            y_host = y_host + down_bias[None]
        return LayerResult(x + y_device + y_host, cache, hits, fired)

    # Without it XLA waits for the residents before it calls the host.
    options = {"xla_gpu_enable_latency_hiding_scheduler": True} if second_stream else None
    return jax.jit(run, static_argnames="attend", donate_argnames="cache", compiler_options=options)
