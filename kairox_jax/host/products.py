"""Products of a few tokens, or of a prompt's, with the rows of a matrix."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from kairox_jax.host import decode, loops, prompt, rows, threads
from kairox_jax.host.calls import (
    COUNTERS,
    MAX_BATCH,
    SERIAL_BYTES,
    aligned,
    check_floats,
    checked,
    read_only,
    room_for,
)
from kairox_jax.quant.formats import PackedRows, block_format


def matvec(
    x: Float[np.ndarray, "B D"],
    matrix: Float[np.ndarray, "V D"] | PackedRows,
    out: Float[np.ndarray, "B V"],
    *,
    activations: str = "float32",
) -> None:
    """Multiply each token with every row of a matrix: out = x matrix^T.

    Args:
        x: float32 [B, D], B 1 to 8.
        matrix: float32 [V, D], or packed rows.
        out: float32 [B, V], overwritten.
        activations: as for ``residual_ffn``.

    Raises:
        ValueError: shapes, types or the format do not fit together.
    """
    check_floats("x", x, (None, None))
    batch, num = x.shape
    raw, format = _matrix(matrix, num)
    if not 1 <= batch <= MAX_BATCH:
        raise ValueError(f"x holds {batch} tokens: expected 1 to {MAX_BATCH}; split larger batches")
    check_floats("out", out, (batch, raw.shape[0]), written=True)
    mark, width = rows.mark_of(format, checked(activations)), rows.width_of(batch)
    with threads.own(1 if raw.size < SERIAL_BYTES else None) as helpers:
        inputs = aligned("inputs", rows.prepared_floats(num, len(width)))
        loops.matvec(
            read_only(x), inputs, raw, mark, width, max(16, -(-raw.shape[0] // 64)), out, COUNTERS, helpers
        )


def matmul(
    x: Float[np.ndarray, "T D"], matrix: Float[np.ndarray, "V D"] | PackedRows, out: Float[np.ndarray, "T V"]
) -> None:
    """Multiply many tokens, as a prompt has them, with every row of a matrix: out = x matrix^T.

    Args:
        x: float32 [T, D]; never rounded.
        matrix: float32 [V, D], or packed rows, each of which is unpacked once for all tokens.
        out: float32 [T, V], overwritten. It does not depend on the number of threads.

    Raises:
        ValueError: shapes, types or the format do not fit together.
    """
    check_floats("x", x, (None, None))
    raw, format = _matrix(matrix, x.shape[1])
    check_floats("out", out, (len(x), raw.shape[0]), written=True)
    with threads.own() as helpers:
        prompt.matmul(read_only(x), room_for(*x.shape), raw, rows.MARKS[format], out, COUNTERS, helpers)


def _matrix(matrix: Float[np.ndarray, "V D"] | PackedRows, num: int) -> tuple[np.ndarray, str]:
    """Return a matrix's rows as bytes, and their format."""
    if isinstance(matrix, PackedRows):
        raw, format = matrix.data, matrix.format
    else:
        check_floats("matrix", matrix, (None, num))
        raw, format = matrix.view(np.uint8), "f32"
    if format not in decode.CODES:
        raise ValueError(f"host kernels read {', '.join(decode.CODES)}, not {format}: convert the matrix")
    if raw.shape[1] != block_format(format).row_bytes(num) or not raw.flags.c_contiguous:
        raise ValueError(f"matrix rows of {raw.shape[1]} bytes are not {num} {format} weights, as x needs")
    return read_only(raw), format
