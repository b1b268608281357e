"""Block formats of weight rows: how many bytes a row takes, how to unpack it, how to pack it.

The bytes are those of GGUF: blocks of 32 along the row, float16 scales, low nibbles first.
NumPy only; the kernels in ``host`` and ``pallas_kernels`` read the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """How one block of a row is stored.

    Attributes:
        name: key of ``FORMATS``.
        block_elems: weights in a block.
        block_bytes: bytes of a block.
    """

    name: str
    block_elems: int
    block_bytes: int

    def row_bytes(self, num_elems: int) -> int:
        """Return the bytes of a row of ``num_elems`` weights.

        Raises:
            ValueError: the row is not made of whole blocks.
        """
        if num_elems % self.block_elems:
            raise ValueError(
                f"a {self.name} row needs a multiple of {self.block_elems} weights, not {num_elems}: "
                "keep this tensor in f16 or f32"
            )
        return num_elems // self.block_elems * self.block_bytes

    def row_elems(self, num_bytes: int) -> int:
        """Return the weights in a row of ``num_bytes`` bytes.

        Raises:
            ValueError: the bytes are not whole blocks.
        """
        if num_bytes % self.block_bytes:
            raise ValueError(f"{num_bytes} bytes are no whole {self.name} blocks of {self.block_bytes} bytes")
        return num_bytes // self.block_bytes * self.block_elems


FORMATS: dict[str, BlockFormat] = {
    fmt.name: fmt
    for fmt in (
        BlockFormat(name="f32", block_elems=1, block_bytes=4),
        BlockFormat(name="f16", block_elems=1, block_bytes=2),
        BlockFormat(name="bf16", block_elems=1, block_bytes=2),
        BlockFormat(name="q8_0", block_elems=32, block_bytes=34),
        BlockFormat(name="q4_0", block_elems=32, block_bytes=18),
        BlockFormat(name="q4_1", block_elems=32, block_bytes=20),
    )
}


def _nibbles(packed: UInt8[np.ndarray, "*rows 16"]) -> Float[np.ndarray, "*rows 32"]:
    return np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float32)


def _half(raw: UInt8[np.ndarray, "*rows n"]) -> Float[np.ndarray, "*rows m"]:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def dequantize(raw: UInt8[np.ndarray, "*rows nbytes"], name: str) -> Float[np.ndarray, "*rows D"]:
    """Unpack rows to float32.

    Args:
        raw: bytes of whole rows, any leading axes.
        name: key of ``FORMATS``.

    Returns:
        float32 weights, a fresh array.

    Raises:
        ValueError: unknown format, or bytes that are no whole blocks.

    Source: GGML's block layouts (GGUF specification).
    """
    fmt = block_format(name)
    num_elems = fmt.row_elems(raw.shape[-1])
    raw = np.ascontiguousarray(raw)
    if name == "f32":
        return raw.view(np.float32).copy()
    if name == "f16":
        return raw.view(np.float16).astype(np.float32)
    if name == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    blocks = raw.reshape(*raw.shape[:-1], -1, fmt.block_bytes)
    scale = _half(blocks[..., :2])
    if name == "q8_0":
        values = blocks[..., 2:].view(np.int8).astype(np.float32) * scale
    elif name == "q4_0":
        values = (_nibbles(blocks[..., 2:]) - np.float32(8)) * scale
    else:
        values = _nibbles(blocks[..., 4:]) * scale + _half(blocks[..., 2:4])
    return values.reshape(*raw.shape[:-1], num_elems)


def block_format(name: str) -> BlockFormat:
    """Return the format of that name.

    Raises:
        ValueError: unknown name.
    """
    if name not in FORMATS:
        raise ValueError(f"weight format {name!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[name]


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """A matrix whose rows are kept in a block format.

    Attributes:
        data: uint8 [rows, row bytes].
        format: key of ``FORMATS``.
    """

    data: UInt8[np.ndarray, "rows nbytes"]
    format: str

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, weights in a row)."""
        return self.data.shape[0], block_format(self.format).row_elems(self.data.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.data.nbytes

    def dequantize(self, rows: slice = slice(None)) -> Float[np.ndarray, "rows D"]:
        """Unpack the rows to float32."""
        return dequantize(self.data[rows], self.format)
