"""The GGUF container: header, metadata and tensor table, validated, read through a memory map.

The gguf library's reader takes 2.4 s for the default model's 49152-token vocabulary and crashes or
hangs on malformed headers, so the header is walked in ``gguf_header``; the library gives type sizes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kairox_jax.io.errors import FormatError
from kairox_jax.io.gguf_header import Cursor, read_counts, read_fields, read_tensors
from kairox_jax.io.mapped import MappedFile


class GgufFile:
    """A validated GGUF file.

    Attributes:
        path: the file.
        is_powerinfer: its magic is PowerInfer's.
        fields: metadata; arrays of numbers are NumPy views of the file, arrays of strings ``StringArray``.
        tensors: the tensor table.
    """

    def __init__(self, path: Path) -> None:
        """Map the file and check its header.

        Raises:
            FormatError: names the file and the field that is wrong.
        """
        self.path = path
        if path.stat().st_size < 24:
            raise FormatError(path, "header", "the file is shorter than a GGUF header (24 bytes)")
        self._mapped = MappedFile(path)
        self._data = np.frombuffer(self._mapped.data, np.uint8)
        cursor = Cursor(path, self._mapped.data)
        self.is_powerinfer, num_tensors, num_fields = read_counts(cursor)
        self.fields = read_fields(cursor, num_fields)
        self.tensors = read_tensors(cursor, num_tensors, self._alignment())
        self.shapes = {tensor.name: tensor.shape for tensor in self.tensors.values()}
        self.num_bytes = sum(tensor.num_bytes for tensor in self.tensors.values())

    def _alignment(self) -> int:
        value = self.fields.get("general.alignment", 32)
        if not isinstance(value, int) or value <= 0 or value & (value - 1) or value > 2**20:
            raise FormatError(self.path, "general.alignment", f"{value!r} is no power of two up to 2**20")
        return value

    def path_of(self, name: str) -> Path:
        """Return the file that holds a tensor: this one."""
        return self.path

    def format_of(self, name: str) -> str:
        """Return the name of a tensor's format."""
        return self.tensors[name].format

    def raw(self, name: str) -> tuple[np.ndarray, str]:
        """Return a tensor's bytes, uint8 [*leading, row bytes], read-only, and its format's name."""
        tensor = self.tensors[name]
        raw = self._data[tensor.start : tensor.start + tensor.num_bytes]
        return raw.reshape(*tensor.shape[:-1], -1), tensor.format

    def release(self, name: str | None = None) -> None:
        """Give back the memory of a tensor's pages, or of all; views stay valid."""
        if name is None:
            self._mapped.release()
        else:
            self._mapped.release(self.tensors[name].start, self.tensors[name].num_bytes)
