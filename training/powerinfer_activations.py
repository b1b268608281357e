"""PowerInfer's activation folders: ``activation_0.pt``, ``activation_1.pt``, ... one vector of counts a layer.

The files are torch pickles. They are read without torch, by an unpickler that knows tensors and nothing else.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import OrderedDict
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

_NAME = re.compile(r"activation_(\d+)\.pt")
_STORAGES = {
    "FloatStorage": np.dtype("<f4"),
    "DoubleStorage": np.dtype("<f8"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype("<u2"),  # widened in `_rebuild`
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("<i1"),
    "ByteStorage": np.dtype("<u1"),
}
_MOST_PICKLE_BYTES = 1 << 16  # one tensor's description takes a few hundred
_MOST_BYTES = 1 << 28  # a vector of one number a neuron is far smaller


def activation_files(folder: str | Path) -> list[Path]:
    """Return the folder's files in the order of their layers, 0, 1, 2, ... 10, 11.

    Raises:
        ValueError: no folder, no such files, or a layer is missing.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(
            f"{path} is no folder: give the one that holds activation_0.pt, activation_1.pt, ..."
        )
    found = {int(match[1]): file for file in path.iterdir() if (match := _NAME.fullmatch(file.name))}
    if not found:
        raise ValueError(
            f"{path} holds no activation_0.pt: give the `activation` folder of a PowerInfer model"
        )
    missing = sorted(set(range(max(found) + 1)) - set(found))
    if missing:
        raise ValueError(f"{path} lacks activation_{missing[0]}.pt: the folder is incomplete, fetch it again")
    return [found[layer] for layer in range(len(found))]


def read_activations(folder: str | Path) -> tuple[Float32[np.ndarray, "L F"], bool]:
    """Read the counts as frequencies.

    The files do not say over how many tokens they count. Where all numbers lie in 0..1 they are taken as they are,
    else they are divided by the largest of all layers: right up to one factor, which no ranking depends on.

    Returns:
        Frequencies, float32 [L, F], and whether they are only relative.

    Raises:
        ValueError: a file that is not one vector of numbers, or layers of different sizes.
    """
    layers = []
    for file in activation_files(folder):
        values = read_tensor(file).astype(np.float64)
        if values.ndim != 1 or not values.size:
            raise ValueError(
                f"{file} holds a tensor of shape {list(values.shape)}: expected one number a neuron"
            )
        if layers and values.size != layers[0].size:
            raise ValueError(
                f"{file} has {values.size} neurons, layer 0 has {layers[0].size}: not of one model"
            )
        if not np.isfinite(values).all() or (values < 0).any():
            raise ValueError(f"{file} holds negative, infinite or NaN counts: fetch it again")
        layers.append(values)
    counts = np.stack(layers)
    largest = counts.max()
    if largest == 0:
        raise ValueError(f"{folder}: every count is zero, no neuron was ever active: fetch it again")
    relative = bool(largest > 1)
    return (counts / largest if relative else counts).astype(np.float32), relative


def read_tensor(path: str | Path) -> np.ndarray:
    """Read a file that `torch.save` wrote of one tensor, without torch and without running anything in it.

    Raises:
        ValueError: not a zip of torch's, or with anything in it but one plain tensor.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(BytesIO(path.read_bytes())) as archive:
            return _read_archive(archive)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; check the path") from None
    except zipfile.BadZipFile:
        raise ValueError(
            f"{path} is no torch file of version 1.6 or later: load it with torch and save it again"
        ) from None
    except (
        pickle.UnpicklingError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        EOFError,
        AttributeError,
    ) as error:
        raise ValueError(f"{path} is not one plain tensor, refused: {error}") from None


def _read_archive(archive: zipfile.ZipFile) -> np.ndarray:
    entries = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(entries) != 1:
        raise ValueError("it holds no data.pkl")
    root = entries[0].removesuffix("data.pkl")
    if archive.getinfo(entries[0]).file_size > _MOST_PICKLE_BYTES:
        raise ValueError("its data.pkl is far too large for a tensor's description")
    if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
        raise ValueError("it is not in little-endian order")
    tensor = _TensorUnpickler(archive, root).load()
    if not isinstance(tensor, np.ndarray):
        raise ValueError(f"it holds a {type(tensor).__name__}")
    return tensor


class _Storage:
    """Name of a storage class, as the pickle calls it."""

    def __init__(self, name: str) -> None:
        self.name, self.dtype = name, _STORAGES[name]


class _TensorUnpickler(pickle.Unpickler):
    """Builds NumPy arrays for tensors; every other global is refused."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(BytesIO(archive.read(f"{root}data.pkl")))
        self._archive, self._root = archive, root

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module_name == "torch" and global_name in _STORAGES:
            return _Storage(global_name)
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: Any, /) -> Any:
        kind, storage, key, _, count = pid
        if kind != "storage" or not isinstance(storage, _Storage) or not str(key).isdigit():
            raise pickle.UnpicklingError("it names something other than a storage")
        info = self._archive.getinfo(f"{self._root}data/{key}")
        if info.file_size != count * storage.dtype.itemsize or info.file_size > _MOST_BYTES:
            raise ValueError(f"its storage has {info.file_size} bytes for {count} numbers")
        return storage.name, np.frombuffer(self._archive.read(info), storage.dtype)


def _rebuild(
    storage: tuple[str, np.ndarray], offset: int, shape: Any, strides: Any, *_rest: Any
) -> np.ndarray:
    """Stand in for torch's function of this name; only contiguous tensors are taken."""
    name, values = storage
    dense = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if tuple(strides) != dense and prod(shape) > 1:
        raise ValueError(f"its strides {tuple(strides)} are not those of a contiguous tensor")
    count = prod(shape)
    if offset < 0 or offset + count > values.size:
        raise ValueError("its shape reaches beyond its storage")
    part = values[offset : offset + count].reshape(shape)
    return (part.astype(np.uint32) << 16).view(np.float32) if name == "BFloat16Storage" else part
