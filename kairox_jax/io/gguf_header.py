"""Reading a GGUF header: counts, metadata and tensor table, refusing whatever would leave the file.

What a header asks for is bounded by what the file can hold before anything is allocated.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import gguf
import numpy as np

from kairox_jax.io.errors import FormatError

_TYPES = {
    fmt.name: fmt
    for fmt in gguf.GGMLQuantizationType
    if fmt.name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K")
}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# PowerInfer writes GGUF files with its own magic: their down matrices are transposed, with predictors beside.
POWERINFER_MAGIC = b"PWRI"
# Bounds on what a header may ask for; real files stay far below (a 405B model has 1138 tensors, 40 keys).
_MAX_TENSORS, _MAX_FIELDS = 16384, 4096
_MAX_NAME = 65535
_MAX_TEXT = 16 * 2**20


class StringArray(Sequence[str]):
    """An array of strings, decoded when asked for: a vocabulary costs 8 bytes a token until then."""

    def __init__(self, data: memoryview, starts: array, path: Path, key: str) -> None:
        self._data, self._starts, self._path, self._key = data, starts, path, key

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start = self._starts[index]
        (length,) = struct.unpack_from("<Q", self._data, start)
        return _text(self._data[start + 8 : start + 8 + length], self._path, f"{self._key}[{index}]")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """One line of the tensor table: row-major shape, type name in small letters, place in the file."""

    name: str
    shape: tuple[int, ...]
    format: str
    start: int
    num_bytes: int


def _text(raw: memoryview, path: Path, field: str) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(path, field, f"the text is no valid UTF-8 ({error.reason})") from None


class Cursor:
    """Reads forward through the header and refuses to leave the file."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.pos = path, data, 0

    @property
    def left(self) -> int:
        return len(self.data) - self.pos

    def error(self, field: str, problem: str) -> FormatError:
        return FormatError(self.path, field, problem)

    def take(self, num_bytes: int, field: str) -> memoryview:
        if num_bytes > self.left:
            raise self.error(
                field, f"asks for {num_bytes} bytes at {self.pos}, the file has {self.left} left"
            )
        self.pos += num_bytes
        return self.data[self.pos - num_bytes : self.pos]

    def number(self, code: str, field: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), field))[0]

    def text(self, field: str, limit: int) -> str:
        length = self.number("Q", field)
        if length > limit:
            raise self.error(field, f"a text of {length} bytes; at most {limit} are allowed")
        return _text(self.take(length, field), self.path, field)

    def name(self, field: str) -> str:
        name = self.text(field, _MAX_NAME)
        if not name:
            raise self.error(field, "an empty name")
        return name


def read_counts(cursor: Cursor) -> tuple[bool, int, int]:
    """Read the fixed part of the header.

    Returns:
        Whether this is a PowerInfer file, the number of tensors and the number of metadata pairs.
    """
    magic = bytes(cursor.take(4, "magic"))
    if magic.startswith(b"vers"):
        raise cursor.error("magic", "this is a Git-LFS pointer, not the model: run `git lfs pull`")
    if magic not in (b"GGUF", POWERINFER_MAGIC):
        raise cursor.error("magic", f"{magic!r} in place of b'GGUF': this is no GGUF file")
    version = cursor.number("I", "version")
    if version not in (2, 3):
        kind = "a big-endian file" if version & 0xFFFF == 0 and version else "unknown"
        raise cursor.error("version", f"{version} ({kind}); versions 2 and 3, little-endian, are supported")
    num_tensors, num_fields = cursor.number("Q", "tensor_count"), cursor.number("Q", "kv_count")
    # A tensor's line takes at least 33 bytes, a metadata pair at least 14.
    for field, count, least, most in (
        ("tensor_count", num_tensors, 33, _MAX_TENSORS),
        ("kv_count", num_fields, 14, _MAX_FIELDS),
    ):
        if count > cursor.left // least:
            raise cursor.error(field, f"{count} is more than the file can hold")
        if count > most:
            raise cursor.error(field, f"{count}; at most {most} are supported")
    return magic == POWERINFER_MAGIC, num_tensors, num_fields


def read_fields(cursor: Cursor, count: int) -> dict[str, Any]:
    """Read the metadata."""
    fields: dict[str, Any] = {}
    for i in range(count):
        key = cursor.name(f"key {i}")
        if key in fields:
            raise cursor.error(key, "the key occurs twice")
        fields[key] = _read_value(cursor, key)
    return fields


def _read_value(cursor: Cursor, key: str) -> Any:
    kind = cursor.number("I", key)
    if kind == _STRING:
        return cursor.text(key, _MAX_TEXT)
    if kind == _ARRAY:
        return _read_array(cursor, key)
    if kind not in _SCALARS:
        raise cursor.error(key, f"unknown value type {kind}")
    return cursor.number(_SCALARS[kind], key)


def _read_array(cursor: Cursor, key: str) -> StringArray | np.ndarray:
    kind, count = cursor.number("I", key), cursor.number("Q", key)
    if kind in _SCALARS:
        dtype = np.dtype("<" + _SCALARS[kind])
        return np.frombuffer(cursor.take(count * dtype.itemsize, key), dtype)
    if kind != _STRING:
        raise cursor.error(key, f"an array of value type {kind}; numbers and strings are supported")
    if count > cursor.left // 8:
        raise cursor.error(key, f"an array of {count} strings is more than the file can hold")
    # The one hot loop of opening a file: 98 000 strings in the default model.
    starts, data, pos, end = array("Q"), cursor.data, cursor.pos, len(cursor.data)
    length_at = struct.Struct("<Q").unpack_from
    for i in range(count):
        starts.append(pos)
        if pos + 8 > end:
            raise cursor.error(f"{key}[{i}]", "the file ends inside this array")
        pos += 8 + length_at(data, pos)[0]
        if pos > end:
            raise cursor.error(f"{key}[{i}]", "the string is longer than the file")
    cursor.pos = pos
    return StringArray(data, starts, cursor.path, key)


def read_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    """Read the tensor table; data begin at the next multiple of ``alignment``."""
    lines = [_read_tensor(cursor, i) for i in range(count)]
    base = cursor.pos + -cursor.pos % alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, fmt, offset, num_bytes in lines:
        if name in tensors:
            raise cursor.error(name, "the tensor occurs twice")
        if offset % alignment:
            raise cursor.error(name, f"offset {offset} is no multiple of the alignment {alignment}")
        if base + offset + num_bytes > len(cursor.data):
            raise cursor.error(
                name,
                f"ends at byte {base + offset + num_bytes}, the file at {len(cursor.data)}: "
                "the file is cut off, fetch it again",
            )
        tensors[name] = GgufTensor(
            name=name, shape=shape, format=fmt, start=base + offset, num_bytes=num_bytes
        )
    for before, after in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.start)):
        if before.start + before.num_bytes > after.start:
            raise cursor.error(after.name, f"its data overlaps that of {before.name}")
    return tensors


def _read_tensor(cursor: Cursor, index: int) -> tuple[str, tuple[int, ...], str, int, int]:
    name = cursor.name(f"tensor {index}")
    num_dims = cursor.number("I", f"{name}.n_dims")
    if not 1 <= num_dims <= 4:
        raise cursor.error(f"{name}.n_dims", f"{num_dims}; expected 1 to 4")
    dims = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims, f"{name}.dims"))
    if 0 in dims:
        raise cursor.error(f"{name}.dims", f"{list(dims)} holds a zero")
    kind, offset = cursor.number("I", f"{name}.type"), cursor.number("Q", f"{name}.offset")
    known = {fmt.value: fmt.name for fmt in gguf.GGMLQuantizationType}
    if known.get(kind) not in _TYPES:
        raise cursor.error(
            f"{name}.type",
            f"{known.get(kind, kind)} is not supported; requantize to one of {', '.join(_TYPES)}",
        )
    fmt = _TYPES[known[kind]]
    block_elems, block_bytes = gguf.GGML_QUANT_SIZES[fmt]
    if dims[0] % block_elems:
        raise cursor.error(
            f"{name}.dims", f"rows of {dims[0]} are no whole {fmt.name} blocks of {block_elems}"
        )
    num_bytes = block_bytes * (dims[0] // block_elems)
    for dim in dims[1:]:
        num_bytes *= dim
    return name, tuple(reversed(dims)), fmt.name.lower(), offset, num_bytes
