"""``gather_down`` as a Pallas-Triton kernel: programs share the listed rows of a column block.

Program (i, s) takes chunks s, s + split, s + 2 split, ... of the list, so that work stays even for any count.
The partial sums meet in atomics, or in a second pass of fixed order.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import tiles as t
from pallas_kernels.block_rows import BlockRows, ColumnRows, Rows
from pallas_kernels.slots import as_list
from pallas_kernels.tiles import plt


def gather_down(
    values: jax.Array,
    down: Rows | ColumnRows,
    *,
    slots: jax.Array | None,
    n: jax.Array | None,
    valid: jax.Array | None,
    deterministic: bool,
    interpret: bool = False,
    tiles: t.Tiles | None = None,
) -> jax.Array:
    """Return float32 [B, D]; arguments as in ``api.gather_down``, checked there."""
    tiles = tiles or default_tiles(values.shape[0], down)
    slots, n = as_list(slots, n, valid)
    batch, d = values.shape[0], down.shape[1]
    block_d = t.block_columns(d, tiles.block_d)
    padded_d = pl.cdiv(d, block_d) * block_d  # whole tiles, so that neither atomics nor stores need a mask
    out = jax.ShapeDtypeStruct(
        (tiles.split, batch, padded_d) if deterministic else (batch, padded_d), jnp.float32
    )
    out = jax.eval_shape(lambda zeros: t.in_blocks(zeros, down), out)
    named = {"values": values, "slots": slots, "n": n.reshape(1), **t.row_operands("down", down)}
    names = tuple(name for name, operand in named.items() if operand is not None)
    operands = [named[name] for name in names]
    if not deterministic:
        operands.append(jnp.zeros(out.shape, out.dtype))  # becomes the output, which the atomics add to
    kernel = functools.partial(
        _kernel,
        names=names,
        deterministic=deterministic,
        block_k=tiles.block_k,
        block_d=block_d,
        split=tiles.split,
    )
    total = pl.pallas_call(
        kernel,
        grid=(padded_d // block_d, tiles.split),
        out_shape=out,
        in_specs=[t.ANY] * len(operands),
        out_specs=t.ANY,
        input_output_aliases={} if deterministic else {len(operands) - 1: 0},
        compiler_params=None if interpret else tiles.compiler_params(),
        interpret=interpret,
        name="gather_down_two_pass" if deterministic else "gather_down_atomic",
    )(*operands)
    total = jnp.sum(total, axis=0) if deterministic else total
    return total.reshape(batch, padded_d)[:, :d]


def default_tiles(batch: int, rows: Rows | ColumnRows) -> t.Tiles:
    """Return tiles that compile without spills and load 16 bytes where they can (see the compile report).

    A thread keeps a sum for each column of its load and each batch row: 16 codes times 8 rows are too many.
    """
    if not isinstance(rows, BlockRows | ColumnRows):
        return t.Tiles(block_d=128)
    return t.Tiles(block_d=64 if batch > 2 else 128)


def _kernel(
    *refs, names: tuple[str, ...], deterministic: bool, block_k: int, block_d: int, split: int
) -> None:
    ref, out_ref = dict(zip(names, refs, strict=False)), refs[-1]
    values_ref, slots_ref, n_ref, down_ref = (ref[name] for name in ("values", "slots", "n", "down"))
    down = t.RowTiles.of(ref, "down", block_d)
    batch, num_listed = values_ref.shape
    column, share = pl.program_id(0), pl.program_id(1)
    count = jnp.minimum(n_ref[0], num_listed)

    def body(i, sums):
        position = (share + i * split) * block_k + jnp.arange(block_k, dtype=jnp.int32)  # [block_k]
        rows = plt.load(slots_ref.at[position], mask=position < count, other=-1)
        live = (rows >= 0) & (rows < down_ref.shape[0])
        weights = [plt.load(values_ref.at[b, position], mask=live, other=0) for b in range(batch)]
        needed = live & functools.reduce(jnp.logical_or, [weight != 0 for weight in weights])
        parts = down.load(jnp.where(live, rows, 0), needed, column)  # [block_k, *part_shape] each
        products = [
            jnp.sum(part * weight.reshape(-1, *(1,) * (part.ndim - 1)), axis=0)
            for weight in weights
            for part in parts
        ]
        return tuple(total + product for total, product in zip(sums, products, strict=True))

    num_chunks = (count + block_k - 1) // block_k
    trips = jnp.maximum(num_chunks - share + split - 1, 0) // split
    zeros = (jnp.zeros(down.part_shape, jnp.float32),) * (batch * down.num_parts)
    sums = jax.lax.fori_loop(0, trips, body, zeros)
    for index, total in enumerate(sums):
        b, part = divmod(index, down.num_parts)
        columns = down.columns(column, part)
        if deterministic:
            plt.store(out_ref.at[(share, b, *columns)], total)
        else:
            plt.atomic_add(out_ref, (b, *columns), total)
