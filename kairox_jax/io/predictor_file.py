"""The bytes of ``predictors.safetensors``: packing of weight rows, writing, and reading with its metadata.

Packed rows are U8 tensors [rows, row bytes]; a JSON text in the file's metadata names their formats.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from kairox_jax.io.errors import FormatError
from kairox_jax.io.safetensors_file import read_header
from kairox_jax.quant import PackedRows

WEIGHT_FORMATS = ("f32", "f16", "q8_0", "q4_0")  # of the packed rows of a predictor
_BLOCK = 32
_DTYPES = {"U8": np.uint8, "F16": np.float16, "F32": np.float32}
_KEY = "kairox"  # safetensors metadata maps texts to texts: ours is one JSON object under this key


def pack_rows(values: Float[np.ndarray, "rows n"], name: str) -> PackedRows:
    """Round float rows to a format.

    Args:
        values: finite rows; n a multiple of 32 for the block formats.
        name: one of ``WEIGHT_FORMATS``.

    Raises:
        ValueError: another format, rows that are not whole blocks, or values that are not finite.

    Source: GGML's reference rounding (scale in float16; Q8_0 from the largest magnitude, Q4_0 from the value
        of the largest magnitude, which becomes -8).
    """
    if name not in WEIGHT_FORMATS:
        raise ValueError(f"predictor format {name!r} is not one of {', '.join(WEIGHT_FORMATS)}")
    values = np.ascontiguousarray(values, np.float32)
    if not np.isfinite(values).all():
        raise ValueError("the predictor's weights are NaN or infinite: train it again, with a smaller step")
    if name in ("f32", "f16"):
        rows = np.ascontiguousarray(values.astype(np.float32 if name == "f32" else np.float16))
        return PackedRows(data=rows.view(np.uint8).reshape(len(values), -1), format=name)
    if values.shape[1] % _BLOCK:
        raise ValueError(f"{name} rows of {values.shape[1]} weights: give a multiple of {_BLOCK}")
    blocks = values.reshape(len(values), -1, _BLOCK)
    if name == "q8_0":
        scale = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
        levels = np.clip(np.rint(_divide(blocks, scale)), -127, 127).astype(np.int8).view(np.uint8)
    else:
        at = np.abs(blocks).argmax(-1)[..., None]
        scale = (np.take_along_axis(blocks, at, -1) / -8).astype(np.float16)
        whole = np.clip(np.rint(_divide(blocks, scale)) + 8, 0, 15).astype(np.uint8)
        levels = whole[..., : _BLOCK // 2] | whole[..., _BLOCK // 2 :] << 4
    data = np.concatenate([scale.view(np.uint8), levels], axis=-1)
    return PackedRows(data=data.reshape(len(values), -1), format=name)


def _divide(blocks: np.ndarray, scale: np.ndarray) -> np.ndarray:
    wide = scale.astype(np.float32)
    return np.divide(blocks, wide, out=np.zeros_like(blocks), where=wide != 0)


def write_file(path: Path, tensors: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> None:
    """Write tensors (uint8, float16 or float32) and a JSON object; the file appears whole or not at all."""
    names = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(dict(meta), ensure_ascii=False)}}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())
    os.replace(unfinished, path)


def read_meta(path: Path) -> dict[str, Any]:
    """Read the JSON object of a file, without its tensors.

    Raises:
        FormatError: the file is damaged, or holds no such object.
    """
    read_header(path)  # a damaged header is told in one line
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    try:
        meta = json.loads(header["__metadata__"][_KEY])
    except (KeyError, TypeError, ValueError):
        meta = None
    if not isinstance(meta, dict):
        raise FormatError(path, f"__metadata__.{_KEY}", "missing, or no JSON object: these are no predictors")
    return meta


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read every tensor into memory of its own.

    Raises:
        FormatError: the file is damaged, or a tensor has an unexpected type.
    """
    tensors = {}
    for name, entry in read_header(path).items():
        if entry.dtype not in _DTYPES:
            raise FormatError(path, name, f"type {entry.dtype}: expected {', '.join(_DTYPES)}")
        raw = np.frombuffer(entry.file.data, np.uint8)[entry.start : entry.start + entry.num_bytes]
        tensors[name] = raw.copy().view(_DTYPES[entry.dtype]).reshape(entry.shape)
    return tensors
