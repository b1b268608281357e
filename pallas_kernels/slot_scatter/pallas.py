"""``slot_scatter`` as one Pallas-Triton kernel for all arrays of a record: one launch, free padding."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import tiles as t
from pallas_kernels.tiles import plt

TILES = t.Tiles(block_d=1024)


def slot_scatter(
    cache: tuple[jax.Array, ...],
    staging: jax.Array,
    slots: jax.Array,
    *,
    interpret: bool = False,
    tiles: t.Tiles = TILES,
) -> tuple[jax.Array, ...]:
    """Return the updated cache; arguments as in ``api.slot_scatter``, checked there."""
    num_arrays, d = len(cache), cache[0].shape[1]
    block_d = t.block_columns(d, tiles.block_d)
    return tuple(
        pl.pallas_call(
            functools.partial(_kernel, num_arrays=num_arrays, block_d=block_d),
            grid=(slots.shape[0], pl.cdiv(d, block_d)),
            out_shape=[jax.ShapeDtypeStruct(rows.shape, rows.dtype) for rows in cache],
            in_specs=[t.ANY] * (2 + num_arrays),
            out_specs=[t.ANY] * num_arrays,
            input_output_aliases={2 + r: r for r in range(num_arrays)},
            compiler_params=None if interpret else tiles.compiler_params(),
            interpret=interpret,
            name="slot_scatter",
        )(slots.astype(jnp.int32), staging, *cache)
    )


def _kernel(slots_ref, staging_ref, *cache_refs, num_arrays: int, block_d: int) -> None:
    out_refs = cache_refs[num_arrays:]  # the first half are the same arrays as inputs
    num_slots, d = out_refs[0].shape
    m = pl.program_id(0)
    slot = slots_ref[m]
    cols = pl.program_id(1) * block_d + jnp.arange(block_d, dtype=jnp.int32)
    inside = (slot >= 0) & (slot < num_slots)
    mask = jnp.broadcast_to(inside, cols.shape) & (cols < d)
    row = jnp.maximum(jnp.minimum(slot, num_slots - 1), 0)
    for r in range(num_arrays):
        plt.store(
            out_refs[r].at[row, cols], plt.load(staging_ref.at[m, r, cols], mask=mask, other=0), mask=mask
        )
