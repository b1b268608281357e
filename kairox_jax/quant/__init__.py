"""Block formats of weight rows and shared-scale columns: sizes and unpacking, and the layout of records."""

from kairox_jax.quant.columns import (
    COLUMN_FORMATS,
    ColumnFormat,
    SharedScales,
    column_format,
    padded_columns,
    scales_bytes,
    split_columns,
    unpack_columns,
)
from kairox_jax.quant.formats import FORMATS, BlockFormat, PackedRows, block_format, dequantize
from kairox_jax.quant.records import RecordLayout, transpose_rows

__all__ = [
    "COLUMN_FORMATS",
    "FORMATS",
    "BlockFormat",
    "ColumnFormat",
    "PackedRows",
    "RecordLayout",
    "SharedScales",
    "block_format",
    "column_format",
    "dequantize",
    "padded_columns",
    "scales_bytes",
    "split_columns",
    "transpose_rows",
    "unpack_columns",
]
