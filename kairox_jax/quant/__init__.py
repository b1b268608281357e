"""Block formats of weight rows: sizes and unpacking."""

from kairox_jax.quant.formats import FORMATS, BlockFormat, PackedRows, block_format, dequantize

__all__ = ["FORMATS", "BlockFormat", "PackedRows", "block_format", "dequantize"]
