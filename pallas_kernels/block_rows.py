"""Quantised rows on the device: 8- and 4-bit codes in blocks of 32 weights, and their scales apart.

GGUF puts a two-byte scale in front of each block: blocks of 34 or 18 bytes, off every 16-byte border.
Split, codes are read 16 bytes at a time. The host sends GGUF bytes; ``split_blocks`` runs on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float16, Int8, UInt8

BLOCK = 32  # weights a block, in both formats
_SCALE_BYTES = 2


class BlockRows(NamedTuple):
    """C rows of D weights (or any leading axes): weight = scale * code, D a multiple of 32.

    Attributes:
        codes: q8_0: int8 [C, D/32, 32]. q4_0: uint8 [C, D/32, 16]; byte j of a block holds weight j in its
            low and weight j + 16 in its high half, each plus 8.
        scales: float16 [C, D/32].
    """

    codes: Int8[Array, "C N 32"] | UInt8[Array, "C N 16"]
    scales: Float16[Array, "C N"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and weights a row, (C, D), as for a dense array."""
        return *self.scales.shape[:-1], self.scales.shape[-1] * BLOCK


Rows = jax.Array | BlockRows


def empty_rows(num_rows: int, d: int, fmt: str) -> BlockRows:
    """Return ``num_rows`` rows of ``d`` zero weights in "q8_0" or "q4_0".

    Raises:
        ValueError: the format is another, or ``d`` is no multiple of 32.
    """
    width, dtype = _codes_of(fmt)
    if d % BLOCK:
        raise ValueError(f"{fmt} rows hold whole blocks of {BLOCK} weights, not {d}: keep this tensor dense")
    shape = (num_rows, d // BLOCK)
    return BlockRows(jnp.zeros((*shape, width), dtype), jnp.zeros(shape, jnp.float16))


def split_blocks(raw: UInt8[Array, "*rows bytes"], fmt: str) -> BlockRows:
    """Split GGUF bytes into codes and scales (on the device, inside a jit).

    Args:
        raw: uint8 [..., row_bytes], rows of whole blocks as GGUF stores them.
        fmt: "q8_0" or "q4_0".

    Returns:
        Codes [..., D/32, 32 or 16] and scales [..., D/32].

    Raises:
        ValueError: the format is another, or the bytes are not whole blocks.
    """
    width, dtype = _codes_of(fmt)
    if raw.shape[-1] % (width + _SCALE_BYTES):
        raise ValueError(
            f"{raw.shape[-1]} bytes are no whole {fmt} blocks of {width + _SCALE_BYTES} bytes: pass GGUF rows"
        )
    blocks = raw.reshape(*raw.shape[:-1], -1, width + _SCALE_BYTES)
    scales = jax.lax.bitcast_convert_type(blocks[..., :_SCALE_BYTES], jnp.float16)
    return BlockRows(jax.lax.bitcast_convert_type(blocks[..., _SCALE_BYTES:], dtype), scales)


def row_format(rows: Rows) -> str:
    """Return "q8_0", "q4_0", or the dtype's name of dense rows."""
    if not isinstance(rows, BlockRows):
        return rows.dtype.name
    return "q8_0" if rows.codes.dtype == jnp.int8 else "q4_0"


def take_rows(rows: Rows, pick: jax.Array | None) -> Float[Array, "K D"]:
    """Return the picked rows (all for None) as float32; every index must be inside."""
    if pick is not None:
        rows = jax.tree.map(lambda leaf: leaf.at[pick].get(mode="promise_in_bounds"), rows)
    if not isinstance(rows, BlockRows):
        return rows.astype(jnp.float32)
    codes = rows.codes
    if row_format(rows) == "q4_0":
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=-1).astype(jnp.int8) - 8  # [K, N, 32]
    weights = codes.astype(jnp.float32) * rows.scales.astype(jnp.float32)[..., None]
    return weights.reshape(rows.shape)


def _codes_of(fmt: str) -> tuple[int, type]:
    """Return bytes of codes a block, and their dtype."""
    if fmt not in ("q8_0", "q4_0"):
        raise ValueError(f"format {fmt!r} has no device form: use q8_0, q4_0, or dense rows")
    return (BLOCK, jnp.int8) if fmt == "q8_0" else (BLOCK // 2, jnp.uint8)
