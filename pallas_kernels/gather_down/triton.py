"""``gather_down`` as a Triton kernel through jax-triton: the twin of ``pallas.py``, same tiles and shares.

Only the two-pass form: jax-triton has no plain way to hand an output to atomics, and the second pass is small.
"""

# The kernels are Triton's language, which pyright reads as Python.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels import tiles as t
from pallas_kernels.block_rows import ColumnRows, Rows
from pallas_kernels.gather_down.pallas import default_tiles
from pallas_kernels.slots import as_list
from pallas_kernels.triton_rows import Launch, columns, load_tile, operands, row_constants


def gather_down(values: jax.Array, down: Rows | ColumnRows, **options: Any) -> jax.Array:
    """Return float32 [B, D], always the same bits; arguments as in ``launch``."""
    return jnp.sum(launch(values, down, **options).run(), axis=0)[:, : down.shape[1]]


def launch(
    values: jax.Array,
    down: Rows | ColumnRows,
    *,
    slots: jax.Array | None,
    n: jax.Array | None,
    valid: jax.Array | None,
    tiles: t.Tiles | None = None,
) -> Launch:
    """Prepare the kernel, which gives shares [split, B, whole tiles]; arguments as in ``api.gather_down``."""
    tiles = tiles or default_tiles(values.shape[0], down)
    slots, n = as_list(slots, n, valid)
    batch, num_listed = values.shape
    constants = row_constants(down, tiles)
    block_d = constants["BLOCK_D"]
    num_tiles = -(-down.shape[1] // block_d)  # whole tiles, so that stores need no mask
    out = jax.ShapeDtypeStruct((tiles.split, batch, num_tiles * block_d), jnp.float32)
    shared = isinstance(down, ColumnRows)
    groups = down.blocks if shared else slots  # not read without shared scales
    arrays = (values.astype(jnp.float32), *operands(down), groups, slots, n.reshape(1))
    constants |= {"BATCH": batch, "NUM_LISTED": num_listed, "SPLIT": tiles.split, "SHARED": shared}
    grid = (num_tiles, tiles.split)
    return Launch(
        kernel=gather_down_kernel, arrays=arrays, out=out, grid=grid, tiles=tiles, constants=constants
    )


@triton.jit
def gather_down_kernel(
    values, down, scales, minima, groups, slots, n, out,
    BATCH: tl.constexpr, NUM_LISTED: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    FORMAT: tl.constexpr, SHARED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (i, s) sums chunks s, s + SPLIT, s + 2 SPLIT, ... of the list over column block i."""
    column, share = tl.program_id(0), tl.program_id(1)
    count = tl.minimum(tl.load(n), NUM_LISTED)
    num_parts: tl.constexpr = 1 if FORMAT == "dense" or FORMAT == "q8_0" else 2
    sums = ()
    for _ in tl.static_range(BATCH):
        for part in tl.static_range(num_parts):
            sums = sums + (columns(column, part, FORMAT, BLOCK_D).to(tl.float32) * 0.0,)
    num_chunks = (count + BLOCK_K - 1) // BLOCK_K
    trips = tl.maximum(num_chunks - share + SPLIT - 1, 0) // SPLIT
    for i in range(trips):
        position = (share + i * SPLIT) * BLOCK_K + tl.arange(0, BLOCK_K)
        rows = tl.load(slots + position, mask=position < count, other=-1)
        live = (rows >= 0) & (rows < C)
        needed = position < 0  # nothing yet
        weights = ()
        for b in tl.static_range(BATCH):
            weight = tl.load(values + b * NUM_LISTED + position, mask=live, other=0.0)
            weights = weights + (weight,)
            needed = needed | (weight != 0)
        needed = needed & live
        safe = tl.where(live, rows, 0)
        if SHARED:
            group = tl.load(groups + safe, mask=needed, other=0)
        else:
            group = safe
        parts = load_tile(down, scales, minima, group, safe, needed, column, D, FORMAT, SHARED, BLOCK_D)
        added = ()
        for b in tl.static_range(BATCH):
            for part in tl.static_range(num_parts):
                product = parts[part] * _beside(weights[b], FORMAT)
                added = added + (sums[b * num_parts + part] + tl.sum(product, axis=0),)
        sums = added
    padded: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D * BLOCK_D
    for b in tl.static_range(BATCH):
        for part in tl.static_range(num_parts):
            cols = columns(column, part, FORMAT, BLOCK_D)
            tl.store(out + (share * BATCH + b) * padded + cols, sums[b * num_parts + part])


@triton.jit
def _beside(weights, FORMAT: tl.constexpr):
    """View [K] beside a part of a tile."""
    if FORMAT == "dense":
        viewed = weights[:, None]
    else:
        viewed = weights[:, None, None]
    return viewed
