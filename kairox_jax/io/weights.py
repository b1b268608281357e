"""From a file's tensors to canonical weights: the entry table and how an entry is read.

A ``TensorFile`` gives raw rows; an ``Entry`` says which tensor, which rows and whether it is stored
the other way round. One tensor is unpacked at a time, so importing needs little memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import gguf
import numpy as np
from jaxtyping import Float, Int

from kairox_jax.io.errors import FormatError
from kairox_jax.quant import FORMATS, PackedRows, dequantize

# Unpacking makes temporaries as large as its result: 1 MiB of float32 at a time stays in the CPU's cache,
# and the default model's embedding peaks at 1.0 rather than 2.2 times its size.
_CHUNK_ELEMS = 2**18
# The formats in which each weight stands for itself, by the whole number of its size.
_ITEM_KINDS = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16}
_NOT_FINITE = {"f16": 0x7C00, "bf16": 0x7F80}  # least bits of an infinity or a NaN, without the sign
_TRANSPOSED_ROWS = 256  # 1.3 GB/s, where plain copying of the transposed view runs at 0.2


class TensorFile(Protocol):
    """Named tensors in a file or in several."""

    @property
    def path(self) -> Path:
        """The file, or the folder."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensor data."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Row-major shape of each tensor."""
        ...

    def path_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        ...

    def format_of(self, name: str) -> str:
        """Name of a tensor's block format."""
        ...

    def raw(self, name: str) -> tuple[np.ndarray, str]:
        """Read-only uint8 [*leading, row bytes] view of a tensor, and the name of its block format."""
        ...

    def release(self, name: str | None = None) -> None:
        """Give back the memory of a tensor's pages, or of all; views stay valid."""
        ...


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a canonical weight comes from.

    Attributes:
        source: the file's name of the tensor.
        shape: its row-major shape in the file.
        rows: gives the indices of its rows to take, in order; None takes all.
        transpose: the canonical matrix is the file's one transposed (after ``rows``).
    """

    source: str
    shape: tuple[int, ...]
    rows: Callable[[], Int[np.ndarray, " R"]] | None = None
    transpose: bool = False


LAYER_NAME = re.compile(r"(?:^|\.)(?:blk|layers|h)\.(\d+)\.")


def check_entries(file: TensorFile, entries: Mapping[str, Entry]) -> None:
    """Check that the file holds the tensor of each entry, in the shape that the config asks for.

    Raises:
        FormatError: names the tensor, the expected and the found shape.
    """
    sources = {entry.source for entry in entries.values()}
    layers = {m[1] for name in sources if (m := LAYER_NAME.search(name))}
    for name in file.shapes:
        match = LAYER_NAME.search(name)
        if match and layers and match[1] not in layers:
            raise FormatError(
                file.path_of(name), name, f"belongs to a layer beyond the {len(layers)} that the config names"
            )
    for entry in entries.values():
        found = file.shapes.get(entry.source)
        if found is None:
            raise FormatError(file.path, entry.source, f"missing; expected a tensor of shape {entry.shape}")
        if found != entry.shape:
            raise FormatError(
                file.path_of(entry.source), entry.source, f"shape {found}; the config asks for {entry.shape}"
            )


def check_unused(file: TensorFile, entries: Mapping[str, Entry], ignored: re.Pattern[str]) -> None:
    """Refuse a tensor that this model code would not use: leaving it out would give wrong text.

    Args:
        file: the tensors.
        entries: those that are read.
        ignored: matches the start of the names of tensors without effect on the result.

    Raises:
        FormatError: names the tensor.
    """
    used = {entry.source for entry in entries.values()}
    for name in file.shapes:
        if name not in used and not ignored.match(name):
            raise FormatError(
                file.path_of(name),
                name,
                "is not part of this architecture as it is known here: not supported",
            )


def unpack(raw: np.ndarray, fmt: str) -> Float[np.ndarray, "*rows D"]:
    """Unpack rows to float32, a fresh array; formats without kernels go through the gguf library."""
    if fmt in FORMATS:
        return dequantize(raw, fmt)
    return gguf.quants.dequantize(np.ascontiguousarray(raw), gguf.GGMLQuantizationType[fmt.upper()])


def read_entry(file: TensorFile, entry: Entry) -> Float[np.ndarray, ...]:
    """Read one canonical weight as a fresh float32 array, a few rows at a time.

    Raises:
        FormatError: it holds a NaN or an infinity.
    """
    raw, fmt = file.raw(entry.source)
    rows = None if entry.rows is None else entry.rows()
    if raw.ndim == 1:
        values = unpack(raw, fmt)
        out = values if rows is None else values[rows]
    else:
        out = _read_rows(raw, fmt, rows, entry)
    file.release(entry.source)
    check_finite(out, file.path_of(entry.source), entry.source)
    return out


def _read_rows(raw: np.ndarray, fmt: str, rows: np.ndarray | None, entry: Entry) -> Float[np.ndarray, ...]:
    num_rows = len(raw) if rows is None else len(rows)
    shape = (num_rows, *entry.shape[1:])
    out = np.empty(shape[::-1] if entry.transpose else shape, np.float32)
    step = max(1, _CHUNK_ELEMS * num_rows // out.size)
    for first in range(0, num_rows, step):
        part = slice(first, first + step)
        values = unpack(raw[part] if rows is None else raw[rows[part]], fmt)
        if entry.transpose:
            out[:, part] = values.T
        else:
            out[part] = values
    return out


def packed_format(file: TensorFile, entry: Entry) -> str | None:
    """Return the format of what ``pack_entry`` gives, without reading it; None where it gives None.

    A matrix that the file keeps the other way round has rows of its own only where each weight stands for
    itself: the blocks of the other formats span what would become rows.
    """
    fmt = file.format_of(entry.source)
    known = fmt in _ITEM_KINDS if entry.transpose else fmt in FORMATS
    return fmt if known and len(entry.shape) == 2 else None


def pack_entry(file: TensorFile, entry: Entry, *, transposed: bool = False) -> PackedRows | None:
    """Return a canonical matrix in the file's own row format, or None where it has none.

    ``transposed`` asks for the rows of a file that keeps the canonical matrix the other way round.
    """
    if transposed:
        fmt = file.format_of(entry.source)
        known = entry.transpose and fmt in FORMATS and len(entry.shape) == 2
        return PackedRows(data=file_rows(file, entry), format=fmt) if known else None
    fmt = packed_format(file, entry)
    if fmt is None:
        return None
    raw, _ = file.raw(entry.source)
    if entry.rows is not None:
        raw = raw[entry.rows()]
    return PackedRows(data=_transposed(raw, fmt) if entry.transpose else raw, format=fmt)


def file_rows(file: TensorFile, entry: Entry) -> np.ndarray:
    """Return a weight's bytes in whatever format and orientation the file has, its rows selected."""
    raw, _ = file.raw(entry.source)
    return raw if entry.rows is None else raw[entry.rows()]


def _transposed(raw: np.ndarray, fmt: str) -> np.ndarray:
    """Transpose a matrix of single weights exactly, a fresh uint8 array."""
    items = raw.view(_ITEM_KINDS[fmt])
    out = np.empty(items.shape[::-1], items.dtype)
    for first in range(0, len(items), _TRANSPOSED_ROWS):
        part = slice(first, first + _TRANSPOSED_ROWS)
        out[:, part] = items[part].T
    return out.view(np.uint8)


def entry_shape(entry: Entry) -> tuple[int, ...]:
    """Return the canonical shape of a weight, without reading it."""
    shape = entry.shape if entry.rows is None else (len(entry.rows()), *entry.shape[1:])
    return shape[::-1] if entry.transpose else shape


def check_packed(rows: PackedRows, path: Path, name: str) -> None:
    """Check packed rows without unpacking them: quantised blocks are finite where their scales are.

    Raises:
        FormatError: they hold a NaN or an infinity.
    """
    scales = {"q8_0": 1, "q4_0": 1, "q4_1": 2}.get(rows.format, 0)
    if scales:
        blocks = rows.data.reshape(-1, FORMATS[rows.format].block_bytes)
        check_finite(np.ascontiguousarray(blocks[:, : 2 * scales]).view(np.float16), path, name)
        return
    step = max(1, 4 * _CHUNK_ELEMS // max(1, rows.data.shape[1]))
    for first in range(0, len(rows.data), step):
        part = slice(first, first + step)
        if rows.format not in _NOT_FINITE or _has_not_finite(rows.data[part], rows.format):
            check_finite(rows.dequantize(part), path, name)


def _has_not_finite(data: np.ndarray, fmt: str) -> bool:
    """Look at 16-bit weights as whole numbers: four times as fast as unpacking them."""
    magnitude = np.ascontiguousarray(data).view(np.uint16) & 0x7FFF
    return bool(magnitude.size) and int(magnitude.max()) >= _NOT_FINITE[fmt]


def check_finite(values: np.ndarray, path: Path, name: str) -> None:
    """Refuse NaN and infinity.

    The sum of squares is finite whenever every value is below 1e15, and takes no temporary array
    (a third of the time of ``np.isfinite``); only when it is not is each value looked at.

    Raises:
        FormatError: names the tensor and says how many values are wrong.
    """
    flat = values.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.dot(flat, flat)
    if np.isfinite(total):
        return
    bad = flat.size - np.count_nonzero(np.isfinite(flat))
    if bad:
        raise FormatError(
            path,
            name,
            f"{bad} of {flat.size} values are NaN or infinite: the file is damaged, fetch it again",
        )
