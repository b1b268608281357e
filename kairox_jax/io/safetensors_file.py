"""Safetensors: one file or the shards of a folder, validated, read through memory maps.

The header is checked here rather than by the safetensors library, so that every fault is said in one
line with the file and the tensor, and so that rows can be handed out as views of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from kairox_jax.io.errors import FormatError
from kairox_jax.io.json_file import LFS_POINTER, parse_json, read_json
from kairox_jax.io.mapped import MappedFile
from kairox_jax.io.pickles import HOW_TO_CONVERT, find_pickles

_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}
_ITEM_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
_FORMATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
# Bounds on what a header may ask for, beside the library's own limit of 100 MB: parsed, its text takes several
# times its size. A checkpoint of 405B has 1138 tensors in 191 files.
_MAX_HEADER, _MAX_TENSORS = 16_000_000, 16384
_MAX_DIMS = 8
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: str
    path: Path
    file: MappedFile
    start: int
    num_bytes: int


class SafetensorsFolder:
    """All tensors of a folder's safetensors files.

    Attributes:
        path: the folder.
        shapes: row-major shape of each tensor.
        num_bytes: bytes of all tensor data.
    """

    def __init__(self, path: Path) -> None:
        """Map the files and check their headers.

        Raises:
            FormatError: names the file and the tensor or field that is wrong.
        """
        self.path = path
        self._tensors: dict[str, _Tensor] = {}
        files, weight_map = find_shards(path)
        for file in files:
            for name, tensor in read_header(file).items():
                if name in self._tensors:
                    raise FormatError(
                        file, name, f"the tensor occurs in {self._tensors[name].path.name} as well"
                    )
                self._tensors[name] = tensor
        for name, shard in weight_map.items():
            if name not in self._tensors or self._tensors[name].path.name != shard:
                raise FormatError(
                    path / INDEX, name, f"the index says it is in {shard}, which does not hold it"
                )
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.num_bytes = sum(tensor.num_bytes for tensor in self._tensors.values())

    def path_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._tensors[name].path

    def format_of(self, name: str) -> str:
        """Return the name of a tensor's format.

        Raises:
            FormatError: the tensor's type is not F32, F16 or BF16.
        """
        tensor = self._tensors[name]
        if tensor.dtype not in _FORMATS or not tensor.shape:
            raise FormatError(
                tensor.path,
                name,
                f"type {tensor.dtype}, shape {tensor.shape} is not supported; expected F32, F16 or BF16: "
                "use the unquantized checkpoint",
            )
        return _FORMATS[tensor.dtype]

    def raw(self, name: str) -> tuple[np.ndarray, str]:
        """Return a tensor's bytes, uint8 [*leading, row bytes], read-only, and its format's name.

        Raises:
            FormatError: the tensor's type is not F32, F16 or BF16.
        """
        tensor, fmt = self._tensors[name], self.format_of(name)
        data = np.frombuffer(tensor.file.data, np.uint8)[tensor.start : tensor.start + tensor.num_bytes]
        return data.reshape(*tensor.shape[:-1], tensor.shape[-1] * _ITEM_BYTES[tensor.dtype]), fmt

    def release(self, name: str | None = None) -> None:
        """Give back the memory of a tensor's pages, or of all; views stay valid."""
        for tensor in self._tensors.values() if name is None else (self._tensors[name],):
            tensor.file.release(tensor.start, tensor.num_bytes)


def find_shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """List a folder's safetensors files, and what the index says of them (nothing, without one).

    Raises:
        FormatError: no safetensors, a missing shard, or a broken index.
    """
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"], {}
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise FormatError(
                folder / INDEX, "weight_map", "missing or empty; expected tensor names and shards"
            )
        for shard in dict.fromkeys(map(str, weight_map.values())):
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise FormatError(
                    folder / INDEX, "weight_map", f"{shard!r} is no safetensors file of this folder"
                )
            if not (folder / shard).is_file():
                raise FormatError(
                    folder / INDEX,
                    "weight_map",
                    f"the index names shard {shard}, which is not there: fetch it",
                )
        return [folder / shard for shard in sorted(set(weight_map.values()))], weight_map
    files = sorted(folder.glob("*.safetensors"))
    if len(files) > 1:
        raise FormatError(folder, INDEX, f"missing, but there are {len(files)} shards: fetch it")
    if not files:
        pickles = find_pickles(folder)
        problem = f"missing; there are only {HOW_TO_CONVERT.format(source=folder)}"
        raise FormatError(
            folder,
            pickles[0].name if pickles else "*.safetensors",
            problem if pickles else "the folder holds no weights",
        )
    return files, {}


def read_header(path: Path) -> dict[str, _Tensor]:
    """Map a safetensors file and check its header.

    Raises:
        FormatError: names the file and the tensor or field that is wrong.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            raise FormatError(
                path, "header", "this is a Git-LFS pointer, not the weights: run `git lfs pull`"
            )
        if size < 10:
            raise FormatError(path, "header", f"the file has {size} bytes: it is cut off, fetch it again")
    mapped = MappedFile(path)
    data = mapped.data
    (length,) = struct.unpack_from("<Q", data)
    if length > _MAX_HEADER:
        raise FormatError(path, "header", f"its length is given as {length}: this is no safetensors file")
    if 8 + length > size:
        raise FormatError(
            path, "header", f"needs {8 + length} bytes, the file has {size}: it is cut off, fetch it again"
        )
    text = bytes(data[8 : 8 + length])
    if text.count(b"{") > _MAX_TENSORS or text.count(b"[") > 2 * _MAX_TENSORS:
        raise FormatError(path, "header", f"describes more than {_MAX_TENSORS} tensors")
    header = parse_json(text, path)
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, mapped, 8 + length) for name, entry in header.items()}
    _check_extents(path, header, size - 8 - length)
    return tensors


def _tensor(path: Path, name: str, entry: Any, file: MappedFile, base: int) -> _Tensor:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise FormatError(path, name, "expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise FormatError(path, f"{name}.dtype", f"{dtype!r} is not one of {', '.join(_ITEM_BYTES)}")
    if not _whole_numbers(shape) or len(shape) > _MAX_DIMS:
        raise FormatError(
            path, f"{name}.shape", f"{str(shape)[:80]}: expected at most {_MAX_DIMS} whole numbers"
        )
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(path, f"{name}.data_offsets", f"{str(offsets)[:80]}: expected a begin and an end")
    if offsets[1] - offsets[0] != prod(shape) * _ITEM_BYTES[dtype]:
        raise FormatError(
            path,
            f"{name}.data_offsets",
            f"{offsets} is not the size of {dtype} {shape}: the header is damaged",
        )
    return _Tensor(
        shape=tuple(shape),
        dtype=dtype,
        path=path,
        file=file,
        start=base + offsets[0],
        num_bytes=offsets[1] - offsets[0],
    )


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_extents(path: Path, header: Mapping[str, Any], size: int) -> None:
    """Check that the tensors fill the data part, one after the other."""
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        if begin != end:
            kind = "overlaps the tensor before it" if begin < end else "leaves a gap before it"
            raise FormatError(path, f"{name}.data_offsets", f"{begin} {kind}, which ends at {end}")
        end = stop
        if end > size:
            raise FormatError(
                path,
                name,
                f"ends at byte {end} of the data, the file at {size}: it is cut off, fetch it again",
            )
    if end != size:
        raise FormatError(path, "header", f"describes {end} bytes of data, the file has {size}")
