"""``gather_down`` as a Pallas-Triton kernel: programs share the listed rows of a column block.

Program (i, s) takes chunks s, s + split, s + 2 split, ... of the list, so that work stays even for any count.
The partial sums meet in atomics, or in a second pass of fixed order.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import tiles as t
from pallas_kernels.slots import as_list

TILES = t.Tiles(block_d=128)


def gather_down(
    values: jax.Array,
    down: jax.Array,
    *,
    slots: jax.Array | None,
    n: jax.Array | None,
    valid: jax.Array | None,
    deterministic: bool,
    interpret: bool = False,
    tiles: t.Tiles = TILES,
) -> jax.Array:
    """Return float32 [B, D]; arguments as in ``api.gather_down``, checked there."""
    slots, n = as_list(slots, n, valid)
    batch, d = values.shape[0], down.shape[1]
    block_d = t.block_columns(d, tiles.block_d)
    padded_d = pl.cdiv(d, block_d) * block_d  # whole tiles, so that neither atomics nor stores need a mask
    shape = (tiles.split, batch, padded_d) if deterministic else (batch, padded_d)
    operands = [values, down, slots, n.reshape(1)]
    if not deterministic:
        operands.append(jnp.zeros(shape, jnp.float32))  # becomes the output, which the atomics add to
    kernel = functools.partial(
        _kernel, deterministic=deterministic, block_k=tiles.block_k, block_d=block_d, split=tiles.split
    )
    out = pl.pallas_call(
        kernel,
        grid=(padded_d // block_d, tiles.split),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        in_specs=[t.ANY] * len(operands),
        out_specs=t.ANY,
        input_output_aliases={} if deterministic else {len(operands) - 1: 0},
        compiler_params=None if interpret else tiles.compiler_params(),
        interpret=interpret,
        name="gather_down_two_pass" if deterministic else "gather_down_atomic",
    )(*operands)
    return (jnp.sum(out, axis=0) if deterministic else out)[:, :d]


def _kernel(
    values_ref,
    down_ref,
    slots_ref,
    n_ref,
    *out_refs,
    deterministic: bool,
    block_k: int,
    block_d: int,
    split: int,
) -> None:
    out_ref = out_refs[-1]
    batch, num_listed = values_ref.shape
    num_slots, d = down_ref.shape
    part = pl.program_id(1)
    cols = pl.program_id(0) * block_d + jnp.arange(block_d, dtype=jnp.int32)  # [block_d]
    col_mask = t.column_mask(cols, d, block_d)
    count = jnp.minimum(n_ref[0], num_listed)

    def body(i, sums):
        position = (part + i * split) * block_k + jnp.arange(block_k, dtype=jnp.int32)  # [block_k]
        listed = position < count
        rows = plt.load(slots_ref.at[position], mask=listed, other=-1)
        live = (rows >= 0) & (rows < num_slots)
        weights = [plt.load(values_ref.at[b, position], mask=live, other=0) for b in range(batch)]
        needed = live & functools.reduce(jnp.logical_or, [weight != 0 for weight in weights])
        tile = t.load_rows(down_ref, jnp.where(live, rows, 0), cols, needed, col_mask)  # [block_k, block_d]
        return tuple(
            total + jnp.sum(tile * weight[:, None], axis=0)
            for total, weight in zip(sums, weights, strict=True)
        )

    num_chunks = (count + block_k - 1) // block_k
    trips = jnp.maximum(num_chunks - part + split - 1, 0) // split
    sums = jax.lax.fori_loop(0, trips, body, (jnp.zeros((block_d,), jnp.float32),) * batch)
    for b in range(batch):
        if deterministic:
            plt.store(out_ref.at[part, b, cols], sums[b])
        else:
            plt.atomic_add(out_ref, (b, cols), sums[b])
