"""Unpacking of record rows on the device, bit for bit as ``quant.dequantize`` does it on the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from kairox_jax.quant import RecordLayout, block_format


def unpack_rows(raw: UInt8[Array, "M nbytes"], name: str) -> Float[Array, "M D"]:
    """Unpack rows of a block format to float32.

    Args:
        raw: bytes of whole rows, uint8 [M, row bytes].
        name: key of ``quant.FORMATS``.

    Returns:
        float32 [M, D].
    """
    count = raw.shape[0]
    if name == "f32":
        return jax.lax.bitcast_convert_type(raw.reshape(count, -1, 4), jnp.float32)
    if name in ("f16", "bf16"):
        kind = jnp.float16 if name == "f16" else jnp.bfloat16
        return jax.lax.bitcast_convert_type(raw.reshape(count, -1, 2), kind).astype(jnp.float32)
    blocks = raw.reshape(count, -1, block_format(name).block_bytes)
    scale = _half(blocks, 0)
    if name == "q8_0":
        levels = jax.lax.bitcast_convert_type(blocks[..., 2:], jnp.int8).astype(jnp.float32)
        return (levels * scale).reshape(count, -1)
    codes = blocks[..., 2:] if name == "q4_0" else blocks[..., 4:]
    levels = jnp.concatenate([codes & 15, codes >> 4], axis=-1).astype(jnp.float32)
    values = (levels - 8) * scale if name == "q4_0" else levels * scale + _half(blocks, 2)
    return values.reshape(count, -1)


def _half(blocks: UInt8[Array, "M blocks nbytes"], at: int) -> Float[Array, "M blocks 1"]:
    bits = jax.lax.bitcast_convert_type(blocks[..., at : at + 2], jnp.float16)
    return bits.astype(jnp.float32)[..., None]


def unpack_records(
    records: UInt8[Array, "M nbytes"], layout: RecordLayout
) -> tuple[Float[Array, "M D"], ...]:
    """Unpack records to one float32 array [M, D] for each row, in the layout's order."""
    rows = zip(layout.formats, layout.offsets, layout.row_bytes, strict=True)
    return tuple(unpack_rows(records[:, at : at + size], name) for name, at, size in rows)
