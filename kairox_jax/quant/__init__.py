"""Block formats of weight rows: sizes and unpacking."""

from kairox_jax.quant.formats import FORMATS, BlockFormat, PackedRows, block_format, dequantize
from kairox_jax.quant.records import RecordLayout

__all__ = ["FORMATS", "BlockFormat", "PackedRows", "RecordLayout", "block_format", "dequantize"]
