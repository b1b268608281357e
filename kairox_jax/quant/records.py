"""The layout of a neuron's record: gate row, up row, down column as packed rows, one after the other.

Each row keeps its own format, so that a file's rows stay as they are where the kernels read them. A down
matrix is stored by output in most files, with blocks that span neurons: its columns are kept unpacked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, UInt8

from kairox_jax.quant.formats import PackedRows, block_format, dequantize

RECORD_ALIGNMENT = 64  # bytes: a cache line, so that no record shares one with its neighbour


@dataclass(frozen=True, kw_only=True)
class RecordLayout:
    """Where the rows of a record are.

    Attributes:
        num_elems: D, weights of a row.
        formats: of each row in order: (gate, up, down), or (up, down) without a gate; gate and up agree.
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
        for name in self.formats:
            block_format(name).row_bytes(self.num_elems)

    @cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of each row."""
        return tuple(block_format(name).row_bytes(self.num_elems) for name in self.formats)

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
        start, size = self.offsets[row], self.row_bytes[row]
        if values.format != self.formats[row] or values.data.shape != (len(records), size):
            raise ValueError(
                f"row {row} of {len(records)} records needs {self.formats[row]} rows of {size} bytes, "
                f"not {values.format} {list(values.data.shape)}"
            )
        records[:, start : start + size] = values.data

    def unpack(self, records: UInt8[np.ndarray, "F nbytes"]) -> Float[np.ndarray, "F R D"]:
        """Return the records' weights in float32."""
        rows = zip(self.formats, self.offsets, self.row_bytes, strict=True)
        return np.stack([dequantize(records[:, at : at + size], name) for name, at, size in rows], axis=1)
