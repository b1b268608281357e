"""Files mapped into memory, whose pages can be given back once they were read."""

from __future__ import annotations

import mmap
from pathlib import Path


class MappedFile:
    """A whole file, read-only.

    Attributes:
        data: its bytes; views of them stay valid as long as they live.
    """

    def __init__(self, path: Path) -> None:
        """Map a file, which must not be empty."""
        with path.open("rb") as file:
            self._mmap = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.data = memoryview(self._mmap)

    def release(self, start: int = 0, length: int | None = None) -> None:
        """Give back the memory of these bytes' pages; they are read again when touched.

        Without this the pages of a file that was read once count as the process's own memory: an import
        would peak at the file's size plus what is kept of it. Does nothing where the system cannot.
        """
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        end = len(self.data) if length is None else start + length
        start -= start % mmap.PAGESIZE
        if end > start:
            self._mmap.madvise(mmap.MADV_DONTNEED, start, end - start)
