"""Unpacking of record rows on the device, as ``quant.dequantize`` does it on the host."""

from __future__ import annotations

import functools

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
        return jax.lax.bitcast_convert_type(_joined(raw.reshape(count, -1, 4), jnp.uint32), jnp.float32)
    if name in ("f16", "bf16"):
        kind = jnp.float16 if name == "f16" else jnp.bfloat16
        bits = _joined(raw.reshape(count, -1, 2), jnp.uint16)
        return jax.lax.bitcast_convert_type(bits, kind).astype(jnp.float32)
    blocks = raw.reshape(count, -1, block_format(name).block_bytes)
    scale = _half(blocks, 0)
    if name == "q8_0":
        levels = jax.lax.bitcast_convert_type(blocks[..., 2:], jnp.int8).astype(jnp.float32)
        return (levels * scale).reshape(count, -1)
    codes = blocks[..., 2:] if name == "q4_0" else blocks[..., 4:]
    low, high = (codes & 15).astype(jnp.float32), (codes >> 4).astype(jnp.float32)
    if name == "q4_0":
        halves = [(low - 8) * scale, (high - 8) * scale]
    else:
        least = _half(blocks, 2)
        halves = [low * scale + least, high * scale + least]
    return jnp.concatenate(halves, axis=-1).reshape(count, -1)


def _joined(raw: UInt8[Array, "*n bytes"], kind: type) -> Array:
    """Join little-endian bytes by shifts: XLA's CPU backend does it twice as fast as a bitcast of bytes."""
    parts = [raw[..., i].astype(kind) << (8 * i) for i in range(raw.shape[-1])]
    return functools.reduce(jnp.bitwise_or, parts)


def _half(blocks: UInt8[Array, "M blocks nbytes"], at: int) -> Float[Array, "M blocks 1"]:
    bits = _joined(blocks[..., at : at + 2], jnp.uint16)
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)[..., None]


def unpack_records(
    records: UInt8[Array, "M nbytes"], layout: RecordLayout
) -> tuple[Float[Array, "M D"], ...]:
    """Unpack records to one float32 array [M, D] for each row, in the layout's order."""
    rows = zip(layout.formats, layout.offsets, layout.row_bytes, strict=True)
    return tuple(unpack_rows(records[:, at : at + size], name) for name, at, size in rows)
