"""In which format a converted checkpoint keeps each matrix, and its rows in that format."""

from __future__ import annotations

import gguf
import numpy as np

from kairox_jax.io.checkpoint import Checkpoint
from kairox_jax.quant import FORMATS, PackedRows

KEEP = "keep"
QUANTIZE = (KEEP, "f32", "f16", "q8_0", "q4_0")
FFN_ROWS = ("w_gate", "w_up", "w_down")
TABLES = ("embed", "output", "pos_embed")
_BLOCKED = ("q8_0", "q4_0")
_MIXED = "q8_0"  # embedding and output matrix in a q4_0 model: they are few, and hurt most


def stored_format(checkpoint: Checkpoint, name: str, quantize: str) -> str:
    """Return the format in which a matrix is stored.

    ``keep`` keeps the source's rows, in float32 where it has none. The others take their format, but: vectors
    stay float32; predictors and learned positions are kept; the embedding and the output matrix are q8_0
    in a q4_0 model; a matrix whose rows are no whole blocks is kept.

    Raises:
        ValueError: an unknown format, or rows of the residual stream that are no whole blocks.
    """
    if quantize not in QUANTIZE:
        raise ValueError(f"--quantize {quantize!r} is not one of {', '.join(QUANTIZE)}")
    shape = checkpoint.shape(name)
    if len(shape) == 1:
        return "f32"
    block = FORMATS[quantize].block_elems if quantize in _BLOCKED else 1
    if checkpoint.config.d_model % block:
        raise ValueError(
            f"--quantize {quantize}: rows of {checkpoint.config.d_model} weights are no whole blocks of {block}; "
            "leave it out, or use f16"
        )
    last = name.rsplit(".", 1)[-1]
    if quantize == KEEP or last.startswith("pred_") or last == "pos_embed" or shape[-1] % block:
        return checkpoint.packed_format(name) or "f32"
    return _MIXED if quantize == "q4_0" and last in TABLES else quantize


def stored_rows(checkpoint: Checkpoint, name: str, fmt: str) -> PackedRows:
    """Return a matrix's rows in a format: the file's own where it is that one, else made from float32.

    Raises:
        ValueError: a weight is beyond float16's range.
        FormatError: the matrix holds a NaN or an infinity.
    """
    if checkpoint.packed_format(name) == fmt:
        checkpoint.check_packed(name)
        rows = checkpoint.packed(name)
        assert rows is not None
        return rows
    return pack_rows(checkpoint.tensor(name), fmt, name)


def pack_rows(values: np.ndarray, fmt: str, name: str) -> PackedRows:
    """Pack float32 rows as llama.cpp's reference does; ``name`` is for messages.

    Raises:
        ValueError: a weight is beyond float16's range.
    """
    if fmt == "f32":
        return PackedRows(data=values.view(np.uint8), format=fmt)
    if fmt in ("f16", "bf16"):
        return PackedRows(data=_halves(values, fmt, name), format=fmt)
    kind = gguf.GGMLQuantizationType[fmt.upper()]
    return PackedRows(data=gguf.quants.quantize(values, kind).view(np.uint8), format=fmt)


def _halves(values: np.ndarray, fmt: str, name: str) -> np.ndarray:
    if fmt == "bf16":
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16).view(np.uint8)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if not np.isfinite(halves).all():
        raise ValueError(
            f"{name}: a weight of {np.abs(values).max():g} is beyond float16: use --quantize f32"
        )
    return halves.view(np.uint8)
