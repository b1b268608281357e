"""Weights side by side in a few large allocations, which Linux can back with large pages."""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8

ALIGNMENT = 64  # bytes; JAX's CPU backend takes an aligned NumPy array without a copy
LARGE_PAGE = 1 << 21
BLOCK_BYTES = 1 << 25


def aligned_bytes(
    rows: int, row_bytes: int, *, alignment: int = ALIGNMENT, zeroed: bool = False
) -> UInt8[np.ndarray, "rows nbytes"]:
    """Return a uint8 array whose first byte is aligned, uninitialised or of zeros."""
    raw = (np.zeros if zeroed else np.empty)(rows * row_bytes + alignment, np.uint8)
    offset = -raw.ctypes.data % alignment
    return raw[offset : offset + rows * row_bytes].reshape(rows, row_bytes)


class Arena:
    """Hands out aligned arrays, many of one allocation; they live as long as any of them.

    NumPy asks Linux for large pages for arrays from 4 MB on (unless ``NUMPY_MADVISE_HUGEPAGE=0``). A layer of a small
    model is less: in pages of 4 kB a step of SmolLM2-135M, which reads all weights once, spends a fifth of its time on
    finding them. Where Linux has no large pages left nothing changes.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        """Begin with nothing; ``block_bytes`` 0 gives each array an allocation of its own."""
        self._block_bytes = block_bytes
        self._block, self._used = np.empty((1, 0), np.uint8), 0

    def take(self, rows: int, row_bytes: int) -> UInt8[np.ndarray, "rows nbytes"]:
        """Return an uninitialised array."""
        size = rows * row_bytes
        if self._used + size > self._block.shape[1]:
            self._block = aligned_bytes(1, max(size, self._block_bytes), alignment=LARGE_PAGE)
            self._used = 0
        first = self._used
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return self._block[0, first : first + size].reshape(rows, row_bytes)

    def keep(self, array: np.ndarray) -> np.ndarray:
        """Return a read-only copy of a matrix."""
        copy = self.take(len(array), array.shape[1] * array.itemsize).view(array.dtype)
        copy[:] = array
        copy.flags.writeable = False
        return copy
