"""The host kernels in plain NumPy, for tests and for reading: same arguments, same results to rounding."""

from __future__ import annotations

import numpy as np

from kairox_jax.host.rules import Rule
from kairox_jax.quant import PackedRows, RecordLayout, SharedScales


def residual_ffn(
    x: np.ndarray,
    records: np.ndarray,
    biases: np.ndarray | None,
    ids: np.ndarray,
    n: int,
    rule: Rule,
    threshold: float,
    out: np.ndarray,
    active: np.ndarray,
    *,
    layout: RecordLayout | None = None,
    scales: SharedScales | None = None,
) -> None:
    """Do what ``kernels.residual_ffn`` does, in the precision of ``x`` and ``out`` (float32 or float64)."""
    chosen = ids[:n].astype(np.int64)
    if layout is not None:
        records = layout.unpack(records, scales)
    weights = records[chosen].astype(out.dtype)
    offsets = np.zeros(weights.shape[:2])[:, :-1] if biases is None else biases[chosen].astype(out.dtype)
    inputs = np.einsum("bd,nrd->rbn", x.astype(out.dtype), weights[:, :-1]) + offsets.T[:, None, :]
    gate, up = inputs[0], inputs[-1]
    is_gated = weights.shape[1] == 3
    if rule == Rule.SILU:
        values = gate / (1 + np.exp(-gate)) * (up if is_gated else 1)
        size = np.abs(values)
        mask = size > threshold
        values = np.sign(values) * np.minimum(size, (size - threshold) * 3)
    else:
        mask = gate > (threshold if rule == Rule.FATRELU else 0)
        values = gate * up if is_gated else gate
        if rule == Rule.RELU2:
            values = values * gate
        if rule == Rule.DRELU:
            mask &= up > 0
    active[:, :n] = mask
    out[:] = np.where(mask, values, 0) @ weights[:, -1]


def matvec(x: np.ndarray, matrix: np.ndarray | PackedRows, out: np.ndarray) -> None:
    """Do what ``products.matvec`` does, in the precision of ``out``."""
    weights = matrix.dequantize() if isinstance(matrix, PackedRows) else matrix
    out[:] = x.astype(out.dtype) @ weights.T.astype(out.dtype)
