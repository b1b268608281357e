"""Shared-scale columns: the down column of a neuron where the file's blocks run across neurons.

GGUF keeps the down matrix by output, [D, F] in blocks of 32 along F: one scale for 32 neurons. A record keeps its
neuron's codes, a layer keeps one table of the blocks' scales. Nothing is rounded: the weights are the file's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float16, Int, UInt8

from kairox_jax.quant.formats import PackedRows, block_format

BLOCK = 32  # neurons that share a scale, and codes of a group along D
_STRIP = 8  # blocks that are turned at once


@dataclass(frozen=True, kw_only=True)
class ColumnFormat:
    """How the codes of one column are stored.

    D codes in groups of 32, the last one padded with zeros. 8-bit codes are int8. 4-bit codes take 16 bytes a
    group: byte j holds code j in its low and code j + 16 in its high half, as a row's block in GGUF.

    Attributes:
        name: key of ``COLUMN_FORMATS``.
        source: the row format whose blocks are shared.
        group_bytes: bytes of 32 codes.
        zero: code whose weight is 0 (without minima): weight = scale * (code - zero) + minimum.
        has_minima: blocks have a minimum beside their scale.
    """

    name: str
    source: str
    group_bytes: int
    zero: int
    has_minima: bool

    def column_bytes(self, num_elems: int) -> int:
        """Return the bytes of a column's codes; any length from 1 on."""
        return -(-num_elems // BLOCK) * self.group_bytes


COLUMN_FORMATS: dict[str, ColumnFormat] = {
    fmt.name: fmt
    for fmt in (
        ColumnFormat(name="q8_0_column", source="q8_0", group_bytes=32, zero=0, has_minima=False),
        ColumnFormat(name="q4_0_column", source="q4_0", group_bytes=16, zero=8, has_minima=False),
        ColumnFormat(name="q4_1_column", source="q4_1", group_bytes=16, zero=0, has_minima=True),
    )
}


class SharedScales(NamedTuple):
    """One layer's table: row b belongs to neurons 32 b .. 32 b + 31.

    Attributes:
        scales: float16 [F/32, padded D], zero beyond D.
        minima: like ``scales``, or None for formats without.
    """

    scales: Float16[np.ndarray, "G P"]
    minima: Float16[np.ndarray, "G P"] | None

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.scales.nbytes + (0 if self.minima is None else self.minima.nbytes)


def padded_columns(num_elems: int) -> int:
    """Return D rounded up to whole groups."""
    return -(-num_elems // BLOCK) * BLOCK


def scales_bytes(format: str, num_elems: int, num_neurons: int) -> int:
    """Return the bytes of a layer's table for a row format; 0 for formats that carry their own scales."""
    column = COLUMN_FORMATS.get(format)
    if column is None:
        return 0
    return num_neurons // BLOCK * padded_columns(num_elems) * 2 * (1 + column.has_minima)


def column_format(source: str) -> str | None:
    """Return the column format of a matrix stored by output: for "q8_0" "q8_0_column"; None if it is not in blocks."""
    return next((fmt.name for fmt in COLUMN_FORMATS.values() if fmt.source == source), None)


def split_columns(rows: PackedRows) -> tuple[UInt8[np.ndarray, "F nbytes"], SharedScales]:
    """Turn a matrix stored by output into columns.

    Args:
        rows: [D, F] in q8_0, q4_0 or q4_1; F is a multiple of 32, as such rows are.

    Returns:
        The codes, one row of ``ColumnFormat.column_bytes(D)`` a neuron, and the scales.

    Raises:
        ValueError: the format has no shared scales.
    """
    name = column_format(rows.format)
    if name is None:
        raise ValueError(f"{rows.format} rows have no blocks that neurons could share: transpose them")
    column, source = COLUMN_FORMATS[name], block_format(rows.format)
    num, num_neurons = rows.shape
    blocks = rows.data.reshape(num, num_neurons // BLOCK, source.block_bytes)
    head = 4 if column.has_minima else 2
    codes = np.empty((num_neurons, column.column_bytes(num)), np.uint8)
    for first in range(0, blocks.shape[1], _STRIP):
        part = _strip_codes(blocks[:, first : first + _STRIP, head:], column)
        codes[first * BLOCK : first * BLOCK + len(part)] = part
    scales = _table(blocks, 0, num)
    return codes, SharedScales(scales, _table(blocks, 2, num) if column.has_minima else None)


def _strip_codes(
    blocks: UInt8[np.ndarray, "D G nbytes"], column: ColumnFormat
) -> UInt8[np.ndarray, "n nbytes"]:
    """Return the columns of a few blocks: 32 neurons a block."""
    num, count, _ = blocks.shape
    turned = blocks.transpose(1, 2, 0)
    wide = np.zeros((count, BLOCK, padded_columns(num)), np.uint8)
    if column.group_bytes == BLOCK:
        wide[:, :, :num] = turned
        return wide.reshape(count * BLOCK, -1)
    wide[:, : BLOCK // 2, :num] = turned & 15  # byte j of a block: neurons j and j + 16
    wide[:, BLOCK // 2 :, :num] = turned >> 4
    groups = wide.reshape(count * BLOCK, -1, 2, BLOCK // 2)
    return (groups[:, :, 0] | groups[:, :, 1] << 4).reshape(count * BLOCK, -1)


def _table(blocks: UInt8[np.ndarray, "D G nbytes"], at: int, num: int) -> Float16[np.ndarray, "G P"]:
    halves = np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[..., 0]
    table = np.zeros((blocks.shape[1], padded_columns(num)), np.float16)
    table[:, :num] = halves.T
    return table


def unpack_columns(
    codes: UInt8[np.ndarray, "n nbytes"],
    name: str,
    scales: SharedScales,
    neurons: Int[np.ndarray, " n"],
    num_elems: int,
) -> Float[np.ndarray, "n D"]:
    """Unpack columns to float32, the weights of ``quant.dequantize`` bit for bit.

    Args:
        codes: of the neurons.
        name: key of ``COLUMN_FORMATS``.
        scales: the layer's table.
        neurons: whose columns these are.
        num_elems: D.
    """
    column, block = COLUMN_FORMATS[name], neurons // BLOCK
    if column.group_bytes == BLOCK:
        levels = np.ascontiguousarray(codes).view(np.int8).astype(np.float32)
    else:
        groups = codes.reshape(len(codes), -1, BLOCK // 2)
        levels = np.concatenate([groups & 15, groups >> 4], axis=-1).reshape(len(codes), -1)
        levels = levels.astype(np.float32) - np.float32(column.zero)
    values = levels * scales.scales[block].astype(np.float32)
    if scales.minima is not None:
        values = values + scales.minima[block].astype(np.float32)
    return values[:, :num_elems]
