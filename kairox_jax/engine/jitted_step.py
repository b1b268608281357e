"""One layer of a hybrid decode step as one program: front, residents, the host's part by a callback, merge.

On CUDA the residents run on a second stream, so that the callback's wait does not hold them up; XLA's CPU backend
runs independent parts beside each other by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
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


def beside(function: Callable[..., Any], platform: str) -> Callable[..., Any]:
    """Let a part of a program run on a second stream of a CUDA device; elsewhere return it as it is."""
    if platform not in ("cuda", "gpu"):
        return function
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
    platform: str,
) -> Callable[..., LayerResult]:
    """Compile ``(weights, x [B,D], start [B], cache, residents, ids [K], n [], layer [], attend) -> LayerResult``.

    Args:
        front: ``programs.front_program``: merges, attends, normalises.
        resident: ``programs.resident_program``.
        host: ``host.callback.host_ffn`` of a backend that runs inside a jit.
        platform: where the program runs.

    Returns:
        The program. ``weights`` are the front's leaves and norm; ``residents`` the resident program's arguments
        before h, or None where no slot is valid; the first n of ``ids`` are evaluated on the host.
    """
    resident = beside(resident, platform)

    def run(
        weights: tuple[Any, Any],
        x: Array,
        start: Array,
        cache: KVCache,
        residents: tuple[Any, ...] | None,
        ids: Array,
        n: Array,
        layer: Array,
        attend: int,
    ) -> LayerResult:
        leaves, norm = weights
        nothing = jax.numpy.zeros_like(x)
        x, h, cache = front(leaves, norm, x, nothing, nothing, start, cache, attend)
        y_device, hits = nothing, None
        if residents is not None:
            y_device, hits = resident(*residents, h)
        y_host, fired = host(h, ids, n, layer)
        return LayerResult(x + y_device + y_host, cache, hits, fired)

    return jax.jit(run, static_argnames="attend", donate_argnames="cache")
