"""Compiled device programs. Each closes over a module's structure only; weights and caches are arguments.

A Flax module is split once into a tuple of leaves: merging inside the trace costs nothing per call, while
dispatching a module through ``nnx.jit`` costs tens of milliseconds for a few hundred parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kairox_jax.models import KVCache, neuron_values, rms_norm
from kairox_jax.placement import SlotArrays, unpack_records
from kairox_jax.quant import RecordLayout
from pallas_kernels.gather_down import gather_down
from pallas_kernels.gather_gate_up import gather_gate_up

ATTEND_STEP = (
    256  # the least number of cached positions that is read; then powers of two, so that few shapes compile
)

Leaves = tuple[Any, ...]
Rebuild = Callable[[Leaves], Any]


def attend_length(end: int, capacity: int) -> int:
    """Return how many cached positions to read for ``end`` of them: one of few numbers, at least ``end``."""
    length = ATTEND_STEP
    while length < end:
        length *= 2
    return min(length, capacity)


def cache_length(context_length: int) -> int:
    """Return the positions to allocate for a context: a multiple of ``ATTEND_STEP``."""
    return -(-context_length // ATTEND_STEP) * ATTEND_STEP


class Split(NamedTuple):
    """A module as arrays, and how to make a module of such arrays again."""

    rebuild: Rebuild
    leaves: Leaves


def split_module(module: nnx.Module) -> Split:
    """Split a module into the leaves of its state and a function that merges them inside a trace."""
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    return Split(lambda arrays: nnx.merge(graph, jax.tree.unflatten(tree, arrays)), tuple(leaves))


def block_program(rebuild: Rebuild) -> Callable[..., tuple[Array, KVCache]]:
    """Compile a whole layer: ``(leaves, x [B,T,D], start [B], cache, attend) -> x, cache``; donates the cache."""

    def run(leaves: Leaves, x: Array, start: Array, cache: KVCache, attend: int) -> tuple[Array, KVCache]:
        return rebuild(leaves)(x, start, cache, attend=attend)

    return jax.jit(run, static_argnames="attend", donate_argnames="cache")


def front_program(rebuild: Rebuild, eps: float) -> Callable[..., tuple[Array, Array, KVCache]]:
    """Compile what comes before an FFN in a decode step.

    ``(leaves, ffn_norm [D], x [B,D], y_device [B,D], y_host [B,D], start [B], cache, attend)`` merges the FFN of the
    layer before, attends, and gives the residual stream [B,D], the FFN's input h [B,D] and the cache (donated).
    """

    def run(
        leaves: Leaves,
        ffn_norm: Array,
        x: Array,
        y_device: Array,
        y_host: Array,
        start: Array,
        cache: KVCache,
        attend: int,
    ) -> tuple[Array, Array, KVCache]:
        x = (x + y_device + y_host)[:, None]
        y, cache = rebuild(leaves)(x, start, cache, attend=attend)
        x = (x + y)[:, 0]
        return x, rms_norm(x, ffn_norm, eps), cache

    return jax.jit(run, static_argnames="attend", donate_argnames="cache")


def prefill_program(
    rebuild: Rebuild, eps: float, activation: str, layout: RecordLayout
) -> Callable[..., tuple[Array, KVCache]]:
    """Compile a layer over many tokens with the FFN read from its neuron records.

    ``(leaves, ffn_norm [D], records [F,bytes], threshold [], x [B,T,D], start [B], cache, attend) -> x, cache``.
    Every neuron is computed and the inactive ones are dropped: the same function as ``exact``. The records are an
    argument, so that they are streamed to a device that cannot hold them, one layer ahead of the computation.
    """

    def run(
        leaves: Leaves,
        ffn_norm: Array,
        records: Array,
        threshold: Array,
        x: Array,
        start: Array,
        cache: KVCache,
        attend: int,
    ) -> tuple[Array, KVCache]:
        y, cache = rebuild(leaves)(x, start, cache, attend=attend)
        x = x + y
        h = rms_norm(x, ffn_norm, eps)
        gate, up, down = unpack_records(records, layout)
        z, _ = neuron_values(h @ gate.T, h @ up.T, activation, threshold)
        return x + z @ down, cache

    return jax.jit(run, static_argnames="attend", donate_argnames="cache")


def resident_program(
    activation: str, implementation: str, platform: str | None = None
) -> Callable[..., tuple[Float[Array, "B D"], Bool[Array, "B C"]]]:
    """Compile the residents' share of an FFN.

    ``(slots, valid [C], threshold [], h [B,D]) -> y [B,D], active [B,C]``: which slots' neurons were active.
    ``platform`` is what it is compiled for; None means JAX's default backend.
    """

    def run(slots: SlotArrays, valid: Array, threshold: Array, h: Array) -> tuple[Array, Array]:
        gate, up, down = slots
        limit = threshold if activation in ("silu", "fatrelu") else None
        values = gather_gate_up(
            h,
            gate,
            up,
            None,
            None,
            valid=valid,
            rule=activation,
            threshold=limit,
            implementation=implementation,
            platform=platform,
        )
        y = gather_down(
            values,
            down,
            None,
            None,
            valid=valid,
            implementation=implementation,
            platform=platform,
            deterministic=True,
        )
        return y, values != 0

    return jax.jit(run)


def embed_program() -> Callable[[Float[Array, "V D"], Int[Array, "B T"]], Float[Array, "B T D"]]:
    """Compile the embedding of token ids."""
    return jax.jit(lambda table, ids: table[ids])


def logits_program(eps: float) -> Callable[..., Float[Array, "B V"]]:
    """Compile ``(out_norm [D], table [V,D], x [B,D]) -> logits [B,V]``."""

    def run(out_norm: Array, table: Array, x: Array) -> Array:
        return rms_norm(x, out_norm, eps) @ table.T

    return jax.jit(run)
