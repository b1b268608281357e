"""Compiled loops over neurons and rows. Arguments are not checked here: call ``kernels``.

One pass over each record: gate, up, rule and down while the record is in cache.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from kairox_jax.host import rows
from kairox_jax.host.compile import kernel
from kairox_jax.host.rules import Rule

_F32, _F16, _BF16, _Q8_0, _Q4_0, _Q4_1 = rows.F32, rows.F16, rows.BF16, rows.Q8_0, rows.Q4_0, rows.Q4_1
# Less than this is read by the caller alone: waking sleeping workers takes as long.
SERIAL_BYTES = 1 << 18

_SILU, _RELU2, _FATRELU, _DRELU = int(Rule.SILU), int(Rule.RELU2), int(Rule.FATRELU), int(Rule.DRELU)


@kernel()
def _dot(code, row, x, num):
    if code == _F16:
        return rows.dot_f16(row, x, num)
    if code == _BF16:
        return rows.dot_bf16(row, x, num)
    if code == _Q8_0:
        return rows.dot_q8_0(row, x, num)
    if code == _Q4_0:
        return rows.dot_q4_0(row, x, num)
    if code == _Q4_1:
        return rows.dot_q4_1(row, x, num)
    return rows.dot_f32(row, x, num)


@kernel()
def _axpy(code, row, factor, out, num):
    if code == _F32:
        rows.axpy_f32(row, factor, out, num)
    elif code == _F16:
        rows.axpy_f16(row, factor, out, num)
    elif code == _BF16:
        rows.axpy_bf16(row, factor, out, num)
    elif code == _Q8_0:
        rows.axpy_q8_0(row, factor, out, num)
    elif code == _Q4_0:
        rows.axpy_q4_0(row, factor, out, num)
    elif code == _Q4_1:
        rows.axpy_q4_1(row, factor, out, num)


@kernel()
def _unpack(code, row, out, num):
    if code == _F16:
        rows.unpack_f16(row, out, num)
    elif code == _BF16:
        rows.unpack_bf16(row, out, num)
    elif code == _Q8_0:
        rows.unpack_q8_0(row, out, num)
    elif code == _Q4_0:
        rows.unpack_q4_0(row, out, num)
    elif code == _Q4_1:
        rows.unpack_q4_1(row, out, num)


@kernel()
def _passes(rule, threshold, value):
    """Say whether a gate (ungated: an up value) lets its neuron through. NaN does: the output shows it."""
    if rule == _SILU:
        return True
    return not value <= (threshold if rule == _FATRELU else np.float32(0))


@kernel()
def _value(rule, threshold, gate, up, gated):
    """Return (z, active) of a neuron whose gate passed."""
    if rule == _SILU:
        driver = gate if gated else up
        z = driver / (np.float32(1) + np.float32(math.exp(-driver)))
        if gated:
            z *= up
        return z, not abs(z) <= threshold
    if not gated:
        return (up * up if rule == _RELU2 else up), True
    if rule == _DRELU:
        return gate * up, not up <= np.float32(0)
    return (gate * gate * up if rule == _RELU2 else gate * up), True


@kernel()
def _ffn_chunk(
    x, records, gated, code, down_code, row_bytes, biases, ids, first, last, rule, threshold, partial, active,
):  # fmt: skip
    """Add up neurons ids[first:last] into partial [B, D]; the whole record is read while it is in cache."""
    batch, num = x.shape
    wide_rows = np.empty(num if batch > 1 else 1, np.float32)
    wide = wide_rows.ctypes.data
    x_data, partial_data = x.ctypes.data, partial.ctypes.data
    base = records.ctypes.data
    gates = np.zeros(batch, np.float32)
    partial[:] = 0
    for k in range(first, last):
        neuron = np.int64(ids[k])
        row = base + neuron * records.shape[1]
        following = np.int64(ids[min(k + 1, last - 1)])
        rows.prefetch_head(base + following * records.shape[1])
        # With more than one token a packed row is unpacked once, then used for all of them.
        row_code = code if batch == 1 else _F32
        any_passes = False
        if gated:
            source = row
            if row_code != code:
                _unpack(code, row, wide, num)
                source = wide
            for b in range(batch):
                gates[b] = _dot(row_code, source, x_data + 4 * b * num, num)
                if biases.shape[0] > 0:
                    gates[b] += biases[neuron, 0]
                any_passes |= _passes(rule, threshold, gates[b])
            row += row_bytes
            if not any_passes:
                for b in range(batch):
                    active[b, k] = 0
                continue
        source = row
        if row_code != code:
            _unpack(code, row, wide, num)
            source = wide
        any_passes = False
        for b in range(batch):
            active[b, k] = 0
            if gated and not _passes(rule, threshold, gates[b]):
                continue
            up = _dot(row_code, source, x_data + 4 * b * num, num)
            if biases.shape[0] > 0:
                up += biases[neuron, biases.shape[1] - 1]
            if not gated and not _passes(rule, threshold, up):
                continue
            z, is_active = _value(rule, threshold, gates[b], up, gated)
            if is_active:
                active[b, k] = 1
                gates[b] = z
                any_passes = True
        if not any_passes:
            continue
        row += row_bytes
        source = row
        row_code = down_code if batch == 1 else _F32
        if row_code != down_code:
            _unpack(down_code, row, wide, num)
            source = wide
        for b in range(batch):
            if active[b, k]:
                _axpy(row_code, source, gates[b], partial_data + 4 * b * num, num)
    # numba frees an array after its last use by name: this one keeps the scratch behind ``wide`` alive.
    wide_rows[0] = 0


@kernel(parallel=True)
def ffn(
    x, records, gated, code, down_code, row_bytes, biases, ids, chunk, rule, threshold, partials, out, active,
):  # fmt: skip
    if ids.shape[0] * records.shape[1] < SERIAL_BYTES:
        for c in range(partials.shape[0]):
            _ffn_chunk(
                x, records, gated, code, down_code, row_bytes, biases, ids,
                c * chunk, min((c + 1) * chunk, ids.shape[0]), rule, threshold, partials[c], active,
            )  # fmt: skip
    else:
        for c in prange(partials.shape[0]):
            _ffn_chunk(
                x, records, gated, code, down_code, row_bytes, biases, ids,
                c * chunk, min((c + 1) * chunk, ids.shape[0]), rule, threshold, partials[c], active,
            )  # fmt: skip
    out[:] = 0
    for c in range(partials.shape[0]):
        for b in range(out.shape[0]):
            for d in range(out.shape[1]):
                out[b, d] += partials[c, b, d]


@kernel()
def _matvec_chunk(x, matrix, code, first, last, out):
    """Multiply rows first:last of the matrix with every token."""
    batch, num = x.shape
    wide_rows = np.empty(num if batch > 1 and code != _F32 else 1, np.float32)
    wide, x_data = wide_rows.ctypes.data, x.ctypes.data
    for v in range(first, last):
        row, row_code = matrix.ctypes.data + v * matrix.shape[1], code
        if batch > 1 and code != _F32:
            _unpack(code, row, wide, num)
            row, row_code = wide, _F32
        for b in range(batch):
            out[b, v] = _dot(row_code, row, x_data + 4 * b * num, num)
    wide_rows[0] = 0  # keeps the scratch alive, as in _ffn_chunk


@kernel(parallel=True)
def matvec(x, matrix, code, chunk, out):
    if matrix.size < SERIAL_BYTES:
        _matvec_chunk(x, matrix, code, 0, matrix.shape[0], out)
    else:
        for c in prange((matrix.shape[0] + chunk - 1) // chunk):
            _matvec_chunk(x, matrix, code, c * chunk, min((c + 1) * chunk, matrix.shape[0]), out)
