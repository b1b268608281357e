"""Compiled device programs. Each closes over a module's structure only; weights and caches are arguments.

A Flax module is split once into a tuple of leaves: merging inside the trace costs nothing per call, while
dispatching a module through ``nnx.jit`` costs tens of milliseconds for a few hundred parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kairox_jax.config import ModelConfig
from kairox_jax.models import KVCache, Norm, normalise
from kairox_jax.placement import SlotArrays, down_rows
from kairox_jax.quant import SharedScales
from pallas_kernels import Rows
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


def some_rows(rows: Int[np.ndarray, " n"], batch: int) -> Int[np.ndarray, " n"] | None:
    """Return None where ``rows`` are all of a cache's, in order: its arrays are then used as they are."""
    return None if len(rows) == batch and (rows == np.arange(batch)).all() else rows


@partial(jax.jit, donate_argnames="cache")
def copy_cache_row(cache: KVCache, source: int, target: int) -> KVCache:
    """Copy a row of a cache to another, in place: the passed cache is donated."""
    return KVCache(*(array.at[target].set(array[source]) for array in cache))


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
    """Compile a whole layer: ``(leaves, x [n,T,D], start [n], rows, cache, attend) -> x, cache``; donates the cache.

    ``rows`` as for ``front_program``.
    """

    def run(
        leaves: Leaves, x: Array, start: Array, rows: Array | None, cache: KVCache, attend: int
    ) -> tuple[Array, KVCache]:
        return attend_rows(rebuild(leaves), x, start, rows, cache, attend)

    return jax.jit(run, static_argnames="attend", donate_argnames="cache")


def ffn_input(config: ModelConfig, norm: Norm[Array], before: Array, attended: Array) -> Array:
    """Normalise the residual stream after attention, or before it where the two run in parallel."""
    return normalise(before if config.parallel_block else attended, norm.scale, norm.bias, config.norm_eps)


def attend_rows(
    module: Any, x: Array, start: Array, rows: Array | None, cache: KVCache, attend: int
) -> tuple[Array, KVCache]:
    """Attend with some rows of a cache: x [n,T,D], start and rows [n]; None for rows takes all, in order.

    Of other rows' positions none is read; the new ones are scattered back, padding past the end is dropped.
    """
    if rows is None:
        return module(x, start, cache, attend=attend)
    chosen = KVCache(cache.k[rows, :, :attend], cache.v[rows, :, :attend])
    y, chosen = module(x, start, chosen, attend=attend)
    at = start[:, None] + jnp.arange(x.shape[1])[None, :]

    def put(old: Array, new: Array) -> Array:
        values = jnp.take_along_axis(new, at[:, None, :, None], axis=2, mode="clip").transpose(0, 2, 1, 3)
        return old.at[rows[:, None], :, at].set(values, mode="drop", unique_indices=True)

    return y, KVCache(put(cache.k, chosen.k), put(cache.v, chosen.v))


def front_program(rebuild: Rebuild, config: ModelConfig) -> Callable[..., tuple[Array, Array, KVCache]]:
    """Compile what comes before an FFN in a decode step.

    ``(leaves, ffn_norm, x [n,D], y_device [n,D], y_host [n,D], start [n], rows [n] or None, cache, attend)`` merges
    the FFN of the layer before, attends, and gives the residual stream [n,D], the FFN's input h [n,D] and the cache
    (donated). ``rows`` says which of the cache's sequences these are; None: all of them, in order.
    """

    def run(
        leaves: Leaves,
        ffn_norm: Norm[Array],
        x: Array,
        y_device: Array,
        y_host: Array,
        start: Array,
        rows: Array | None,
        cache: KVCache,
        attend: int,
    ) -> tuple[Array, Array, KVCache]:
        x = x + y_device + y_host
        y, cache = attend_rows(rebuild(leaves), x[:, None], start, rows, cache, attend)
        attended = x + y[:, 0]
        h = ffn_input(config, ffn_norm, x, attended)
        return attended, h, cache

    return jax.jit(run, static_argnames="attend", donate_argnames="cache")


def resident_program(
    activation: str, implementation: str, platform: str | None = None
) -> Callable[..., tuple[Float[Array, "B D"], Bool[Array, "B C"]]]:
    """Compile the residents' share of an FFN.

    ``(slots, scales, biases [C,R-1] or None, valid [C], chosen [B,C] or None, threshold [], h [B,D]) -> y [B,D],
    active [B,C]``: which slots' neurons were active; ``scales`` is the layer's table of shared scales, or None;
    ``chosen`` says which slots each token computes of those that are valid for any. ``platform`` is what it is
    compiled for; None means JAX's default backend.
    """

    def run(
        slots: SlotArrays,
        scales: SharedScales | None,
        biases: Array | None,
        valid: Array,
        chosen: Array | None,
        threshold: Array,
        h: Array,
    ) -> tuple[Array, Array]:
        *gates, up = cast(tuple[Rows, ...], slots[:-1])
        gate, down = gates[0] if gates else None, down_rows(slots, scales)
        by_row = None if biases is None else (biases[:, 0] if gates else None, biases[:, -1])
        limit = threshold if activation in ("silu", "fatrelu") else None
        values = gather_gate_up(
            h,
            gate,
            up,
            None,
            None,
            valid=valid,
            biases=by_row,
            rule=activation,
            threshold=limit,
            implementation=implementation,
            platform=platform,
        )
        if chosen is not None:
            values = jnp.where(chosen, values, 0)
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
        return y[:, : h.shape[1]], values != 0  # shared scales pad D to whole blocks

    return jax.jit(run)


def embed_program() -> Callable[..., Float[Array, "B T D"]]:
    """Compile ``(table [V,D], positions [P,D] or None, ids [B,T], start [B]) -> x [B,T,D]``."""

    def run(table: Array, positions: Array | None, ids: Array, start: Array) -> Array:
        if positions is None:
            return table[ids]
        at = start[:, None] + jnp.arange(ids.shape[1])[None, :]
        return table[ids] + positions.at[at].get(mode="clip")  # padding of a prompt's last piece lies beyond

    return jax.jit(run)


def logits_program(eps: float) -> Callable[..., Float[Array, "B V"]]:
    """Compile ``(out_norm, table [V,D], x [B,D]) -> logits [B,V]``."""

    def run(out_norm: Norm[Array], table: Array, x: Array) -> Array:
        return normalise(x, out_norm.scale, out_norm.bias, eps) @ table.T

    return jax.jit(run)
