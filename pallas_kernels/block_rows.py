"""Quantised rows on the device: 8- and 4-bit codes in blocks of 32 weights, and their scales apart.

GGUF puts scales in front of each block: blocks of 34, 18 or 20 bytes, off every 16-byte border. Split, codes are
read 16 bytes at a time. The host sends GGUF bytes; ``split_blocks`` runs on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, Int8, Int32, UInt8

BLOCK = 32  # weights a block, in all formats
FORMATS = ("q8_0", "q4_0", "q4_1")


class BlockRows(NamedTuple):
    """C rows of D weights (or any leading axes), D a multiple of 32.

    Attributes:
        codes: q8_0: int8 [C, D/32, 32], weight = scale * code. 4 bits: uint8 [C, D/32, 16]; byte j of a block holds
            code j in its low and code j + 16 in its high half. q4_0: weight = scale * (code - 8). q4_1: weight =
            scale * code + minimum.
        scales: float16 [C, D/32].
        minima: float16 [C, D/32] for q4_1, else None.
    """

    codes: Int8[Array, "C N 32"] | UInt8[Array, "C N 16"]
    scales: Float16[Array, "C N"]
    minima: Float16[Array, "C N"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and weights a row, (C, D), as for a dense array."""
        return *self.scales.shape[:-1], self.scales.shape[-1] * BLOCK


class ColumnRows(NamedTuple):
    """C down columns whose scales are shared: row b of the tables belongs to 32 neurons.

    Weights are those of ``BlockRows``, with the scale (and minimum) at [blocks[c], d]. D is padded to whole blocks
    with scale 0.

    Attributes:
        codes: as in ``BlockRows``, along D.
        blocks: int32 [C], the table's row of each column, inside 0..G-1.
        scales: float16 [G, D].
        minima: float16 [G, D] for q4_1, else None.
    """

    codes: Int8[Array, "C N 32"] | UInt8[Array, "C N 16"]
    blocks: Int32[Array, " C"]
    scales: Float16[Array, "G D"]
    minima: Float16[Array, "G D"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Columns and their padded length, (C, D)."""
        return self.codes.shape[0], self.codes.shape[1] * BLOCK


Rows = jax.Array | BlockRows


def empty_rows(num_rows: int, d: int, fmt: str) -> BlockRows:
    """Return ``num_rows`` rows of ``d`` zero weights in one of ``FORMATS``.

    Raises:
        ValueError: the format is another, or ``d`` is no multiple of 32.
    """
    width, dtype, heads = _codes_of(fmt)
    if d % BLOCK:
        raise ValueError(f"{fmt} rows hold whole blocks of {BLOCK} weights, not {d}: keep this tensor dense")
    shape = (num_rows, d // BLOCK)
    return BlockRows(
        jnp.zeros((*shape, width), dtype), *(jnp.zeros(shape, jnp.float16) for _ in range(heads))
    )


def split_blocks(raw: UInt8[Array, "*rows bytes"], fmt: str) -> BlockRows:
    """Split GGUF bytes into codes, scales and minima (on the device, inside a jit).

    Args:
        raw: uint8 [..., row_bytes], rows of whole blocks as GGUF stores them.
        fmt: one of ``FORMATS``.

    Returns:
        Codes [..., D/32, 32 or 16], scales and, for q4_1, minima [..., D/32].

    Raises:
        ValueError: the format is another, or the bytes are not whole blocks.
    """
    width, dtype, heads = _codes_of(fmt)
    block_bytes = width + 2 * heads
    if raw.shape[-1] % block_bytes:
        raise ValueError(
            f"{raw.shape[-1]} bytes are no whole {fmt} blocks of {block_bytes} bytes: pass GGUF rows"
        )
    blocks = raw.reshape(*raw.shape[:-1], -1, block_bytes)
    halves = (jax.lax.bitcast_convert_type(blocks[..., 2 * i : 2 * i + 2], jnp.float16) for i in range(heads))
    return BlockRows(jax.lax.bitcast_convert_type(blocks[..., 2 * heads :], dtype), *halves)


def empty_codes(num_rows: int, d: int, fmt: str) -> jax.Array:
    """Return zeroed codes of ``num_rows`` columns of length ``d``, padded to whole blocks (q4_0: weights -8)."""
    width, dtype, _ = _codes_of(fmt)
    return jnp.zeros((num_rows, -(-d // BLOCK), width), dtype)


def row_format(rows: Rows | ColumnRows) -> str:
    """Return one of ``FORMATS``, with "_column" for shared scales, or the dtype's name of dense rows."""
    if not isinstance(rows, BlockRows | ColumnRows):
        return rows.dtype.name
    name = "q8_0" if rows.codes.dtype == jnp.int8 else "q4_0" if rows.minima is None else "q4_1"
    return name + "_column" * isinstance(rows, ColumnRows)


def take_rows(rows: Rows | ColumnRows, pick: jax.Array | None) -> Float[Array, "K D"]:
    """Return the picked rows (all for None) as float32; every index must be inside."""
    if isinstance(rows, ColumnRows):
        return _take_columns(rows, pick)
    if pick is not None:
        rows = jax.tree.map(lambda leaf: leaf.at[pick].get(mode="promise_in_bounds"), rows)
    if not isinstance(rows, BlockRows | ColumnRows):
        return rows.astype(jnp.float32)
    weights = _levels(rows.codes, rows.minima) * rows.scales.astype(jnp.float32)[..., None]
    if rows.minima is not None:
        weights = weights + rows.minima.astype(jnp.float32)[..., None]
    return weights.reshape(rows.shape)


def _take_columns(rows: ColumnRows, pick: jax.Array | None) -> Float[Array, "K D"]:
    codes, blocks = rows.codes, rows.blocks
    if pick is not None:
        codes, blocks = (leaf.at[pick].get(mode="promise_in_bounds") for leaf in (codes, blocks))

    def shared(table: jax.Array) -> jax.Array:
        return table.at[blocks].get(mode="promise_in_bounds").astype(jnp.float32)

    weights = _levels(codes, rows.minima).reshape(codes.shape[0], -1) * shared(rows.scales)
    return weights if rows.minima is None else weights + shared(rows.minima)


def _levels(codes: jax.Array, minima: jax.Array | None) -> Float[Array, "K N 32"]:
    """Return the codes as numbers; without minima, 4-bit ones lose their zero of 8."""
    if codes.dtype == jnp.int8:
        return codes.astype(jnp.float32)
    both = jnp.concatenate([codes & 15, codes >> 4], axis=-1).astype(jnp.int8)
    return (both - 8 if minima is None else both).astype(jnp.float32)


def _codes_of(fmt: str) -> tuple[int, type, int]:
    """Return bytes of codes a block, their dtype, and the float16 numbers in front of them."""
    if fmt not in FORMATS:
        raise ValueError(f"format {fmt!r} has no device form: use {', '.join(FORMATS)}, or dense rows")
    if fmt == "q8_0":
        return BLOCK, jnp.int8, 1
    return BLOCK // 2, jnp.uint8, 2 if fmt == "q4_1" else 1
