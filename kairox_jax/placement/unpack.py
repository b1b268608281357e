"""Unpacking of record rows on the device, as ``quant.dequantize`` does it on the host."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from kairox_jax.quant import COLUMN_FORMATS, RecordLayout, SharedScales, block_format
from kairox_jax.quant.columns import BLOCK

DENSE_TYPES = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}


def as_numbers(raw: UInt8[Array, "M nbytes"], name: str) -> Float[Array, "M D"]:
    """Take bytes for the numbers that they are, in a type of ``DENSE_TYPES``."""
    kind = DENSE_TYPES[name]
    size = jnp.dtype(kind).itemsize
    bits = _joined(raw.reshape(raw.shape[0], -1, size), jnp.uint32 if size == 4 else jnp.uint16)
    return jax.lax.bitcast_convert_type(bits, kind)


def unpack_rows(raw: UInt8[Array, "M nbytes"], name: str) -> Float[Array, "M D"]:
    """Unpack rows of a block format to float32.

    Args:
        raw: bytes of whole rows, uint8 [M, row bytes].
        name: key of ``quant.FORMATS``.

    Returns:
        float32 [M, D].
    """
    count = raw.shape[0]
    if name in DENSE_TYPES:
        return as_numbers(raw, name).astype(jnp.float32)
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


def unpack_columns(
    codes: UInt8[Array, "M nbytes"],
    name: str,
    scales: SharedScales,
    neurons: Int[Array, " M"] | None,
    num_elems: int,
) -> Float[Array, "M D"]:
    """Unpack shared-scale columns to float32, as ``quant.unpack_columns`` does.

    Args:
        codes: of the neurons.
        name: key of ``quant.COLUMN_FORMATS``.
        scales: the layer's table, on the device.
        neurons: whose columns these are; None means all of a layer, in order.
        num_elems: D.
    """
    column, count = COLUMN_FORMATS[name], codes.shape[0]
    if column.group_bytes == BLOCK:
        levels = jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)
    else:
        groups = codes.reshape(count, -1, BLOCK // 2)
        levels = jnp.concatenate([groups & 15, groups >> 4], axis=-1).reshape(count, -1)
        levels = levels.astype(jnp.float32) - column.zero

    def shared(table: Array) -> Array:
        wide = table.astype(jnp.float32)
        if neurons is None:
            return jnp.repeat(wide, BLOCK, axis=0)
        return wide[neurons // BLOCK]

    values = levels * shared(jnp.asarray(scales.scales))
    if scales.minima is not None:
        values = values + shared(jnp.asarray(scales.minima))
    return values[:, :num_elems]


def unpack_records(
    records: UInt8[Array, "M nbytes"],
    layout: RecordLayout,
    scales: SharedScales | None = None,
    neurons: Int[Array, " M"] | None = None,
) -> tuple[Float[Array, "M D"], ...]:
    """Unpack records to one float32 array [M, D] for each row, in the layout's order.

    Args:
        records: of the neurons.
        layout: of the records.
        scales: the layer's table on the device, where the down columns share scales.
        neurons: whose records these are; None means all of a layer, in order.
    """
    rows = []
    for name, at, size in zip(layout.formats, layout.offsets, layout.row_bytes, strict=True):
        raw = records[:, at : at + size]
        if name in COLUMN_FORMATS:
            assert scales is not None  # the store has a table wherever the layout asks for one
            rows.append(unpack_columns(raw, name, scales, neurons, layout.num_elems))
        else:
            rows.append(unpack_rows(raw, name))
    return tuple(rows)
