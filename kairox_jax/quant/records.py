"""The layout of a neuron's record: gate row, up row, down column, one after the other.

Each keeps the file's own format, so that weights stay as they are where the kernels read them. A down matrix that
the file keeps by output in blocks of 32 neurons becomes shared-scale columns (``quant.columns``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int, UInt8

from kairox_jax.quant.columns import COLUMN_FORMATS, SharedScales, unpack_columns
from kairox_jax.quant.formats import PackedRows, block_format, dequantize

RECORD_ALIGNMENT = 64  # bytes: a cache line, so that no record shares one with its neighbour
_TRANSPOSED_ROWS = 64  # outputs that are turned at once: their lines stay in the cache


@dataclass(frozen=True, kw_only=True)
class RecordLayout:
    """Where the rows of a record are.

    Attributes:
        num_elems: D, weights of a row.
        formats: of each row in order: (gate, up, down), or (up, down) without a gate; gate and up agree. Down may
            be a key of ``COLUMN_FORMATS``.
        alignment: the record's bytes are a multiple of it.
    """

    num_elems: int
    formats: tuple[str, ...]
    alignment: int = RECORD_ALIGNMENT

    def __post_init__(self) -> None:
        if len(self.formats) not in (2, 3):
            raise ValueError(f"a record of {len(self.formats)} rows: expected (gate, up, down) or (up, down)")
        if len(set(self.formats[:-1])) != 1:
            raise ValueError(f"gate and up rows are {self.formats[:-1]}: bring them into one format")
        for name in self.formats[: -1 if self.shares_scales else None]:
            block_format(name).row_bytes(self.num_elems)

    @property
    def shares_scales(self) -> bool:
        """Whether the down columns need a layer's ``SharedScales``."""
        return self.formats[-1] in COLUMN_FORMATS

    @cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of each row."""
        return tuple(
            COLUMN_FORMATS[name].column_bytes(self.num_elems)
            if name in COLUMN_FORMATS
            else block_format(name).row_bytes(self.num_elems)
            for name in self.formats
        )

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each row."""
        return tuple(sum(self.row_bytes[:row]) for row in range(len(self.formats)))

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of a record, padding included."""
        return -(-sum(self.row_bytes) // self.alignment) * self.alignment

    def put(self, records: UInt8[np.ndarray, "F nbytes"], row: int, values: PackedRows) -> None:
        """Write one row of every record.

        Raises:
            ValueError: another format, length or number of rows.
        """
        if values.format != self.formats[row]:
            raise ValueError(
                f"row {row} of the records needs {self.formats[row]}, not {values.format}: convert it first"
            )
        self.put_bytes(records, row, values.data)

    def put_bytes(
        self, records: UInt8[np.ndarray, "F nbytes"], row: int, data: UInt8[np.ndarray, "F row"]
    ) -> None:
        """Write the bytes of one row of every record.

        Raises:
            ValueError: another length or number of rows.
        """
        start, size = self.offsets[row], self.row_bytes[row]
        if data.shape != (len(records), size):
            raise ValueError(
                f"row {row} of {len(records)} records needs {self.formats[row]} rows of {size} bytes, "
                f"not {list(data.shape)}"
            )
        records[:, start : start + size] = data

    def unpack(
        self,
        records: UInt8[np.ndarray, "n nbytes"],
        scales: SharedScales | None = None,
        neurons: Int[np.ndarray, " n"] | None = None,
    ) -> Float[np.ndarray, "n R D"]:
        """Return the records' weights in float32.

        Args:
            records: of the neurons.
            scales: the layer's table; needed where ``shares_scales``.
            neurons: whose records these are; None means 0, 1, 2, ...

        Raises:
            ValueError: a layout with shared scales, but no table.
        """
        neurons = np.arange(len(records)) if neurons is None else neurons
        rows = []
        for name, at, size in zip(self.formats, self.offsets, self.row_bytes, strict=True):
            raw = records[:, at : at + size]
            if name not in COLUMN_FORMATS:
                rows.append(dequantize(raw, name))
            elif scales is None:
                raise ValueError(f"{name} records need the layer's scales: pass the store's table")
            else:
                rows.append(unpack_columns(raw, name, scales, neurons, self.num_elems))
        return np.stack(rows, axis=1)


def transpose_rows(rows: PackedRows, out: UInt8[np.ndarray, "F nbytes"]) -> None:
    """Write a matrix of single weights the other way round, in its own type.

    Args:
        rows: [D, F] in f32, f16 or bf16.
        out: F rows of D weights, contiguous along D.

    Raises:
        ValueError: the weights are in blocks.
    """
    fmt = block_format(rows.format)
    if fmt.block_elems != 1:
        raise ValueError(f"{rows.format} rows are blocks: split them into columns instead")
    kind = np.uint32 if fmt.block_bytes == 4 else np.uint16
    source, target = rows.data.view(kind), out.view(kind)
    for first in range(0, len(source), _TRANSPOSED_ROWS):
        part = slice(first, first + _TRANSPOSED_ROWS)
        target[:, part] = source[part].T
