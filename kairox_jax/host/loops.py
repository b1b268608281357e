"""Compiled loops over neurons and rows. Arguments are not checked here: call ``kernels``.

One pass over each record: gate, up, rule and down while the record is in cache.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from kairox_jax.host import columns, crew, decode, rows
from kairox_jax.host.compile import kernel
from kairox_jax.host.rules import Rule

_MARK_F32, _FIRST_COLUMN = rows.MARK_F32, decode.FIRST_COLUMN

_MAX_PENDING = columns.MAX_NEURONS
_RAMP_SLOPE = np.float32(3)  # as models.rules.RAMP_SLOPE: a value counts in part up to 1.5 thresholds
# What follows a short row is asked for so far ahead: one row of 612 bytes takes less time than memory to answer.
_FAR_BYTES = 4096
_SILU, _RELU2, _FATRELU, _DRELU = int(Rule.SILU), int(Rule.RELU2), int(Rule.FATRELU), int(Rule.DRELU)


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
        size = abs(z)
        part = _RAMP_SLOPE * (size - threshold)
        if part < size:
            z = np.float32(math.copysign(part, z))
        return z, not size <= threshold
    if not gated:
        return (up * up if rule == _RELU2 else up), True
    if rule == _DRELU:
        return gate * up, not up <= np.float32(0)
    return (gate * gate * up if rule == _RELU2 else gate * up), True


@kernel()
def _add_pending(mark, width, pending, factors, count, block, scales, minima, partial):
    """Add the pending columns of one block of neurons to every token's sum."""
    least = minima[block].ctypes.data if minima.shape[0] > 0 else 0
    columns.add_columns(
        mark, width, pending.ctypes.data, factors.ctypes.data, count, scales[block].ctypes.data, least,
        partial.ctypes.data, 4 * partial.shape[1], partial.shape[1] // 32,
    )  # fmt: skip


@kernel()
def _ffn_chunk(
    x, batch, num, records, gated, mark, width, down_mark, row_bytes, biases, scales, minima, ids, first, last, rule,
    threshold, partial, active,
):  # fmt: skip
    """Add up neurons ids[first:last] into partial [width, at least D]; x is the scratch that ``prepare`` filled.

    Rows are read while the record is in cache. Columns that share scales wait until the block of neurons changes.
    """
    tokens = len(width)
    wide_rows = np.empty(num if tokens > 1 else 1, np.float32)
    wide = wide_rows.ctypes.data
    x_data, partial_data, partial_bytes = x.ctypes.data, partial.ctypes.data, 4 * partial.shape[1]
    base, record_bytes = records.ctypes.data, records.shape[1]
    gates, ups = np.zeros(tokens, np.float32), np.empty(tokens, np.float32)
    gates_data, ups_data = gates.ctypes.data, ups.ctypes.data
    pending, factors = np.empty(_MAX_PENDING, np.int64), np.zeros((_MAX_PENDING, tokens), np.float32)
    count, block = 0, np.int64(-1)
    partial[:] = 0
    passed = True
    far = max(1, _FAR_BYTES // record_bytes)  # records
    for k in range(first, last):
        neuron = np.int64(ids[k])
        row = base + neuron * record_bytes
        next_record = base + np.int64(ids[min(k + far, last - 1)]) * record_bytes
        any_passes = False
        if gated:
            # What is read after the gate row is guessed from the neuron before.
            following = row + row_bytes if passed and far == 1 else next_record
            rows.dots(mark, width, row, x_data, num, following, gates_data)
            for b in range(batch):
                if biases.shape[0] > 0:
                    gates[b] += biases[neuron, 0]
                any_passes |= _passes(rule, threshold, gates[b])
            row += row_bytes
            passed = any_passes
            if not any_passes:
                for b in range(batch):
                    active[b, k] = 0
                continue
        following = row + row_bytes if far == 1 else next_record + row_bytes
        rows.dots(mark, width, row, x_data, num, following, ups_data)
        any_passes = False
        for b in range(batch):
            active[b, k] = 0
            if gated and not _passes(rule, threshold, gates[b]):
                continue
            up = ups[b]
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
        if len(down_mark) >= _FIRST_COLUMN:
            if count > 0 and (neuron >> 5 != block or count == _MAX_PENDING):
                _add_pending(down_mark, width, pending, factors, count, block, scales, minima, partial)
                count = 0
            block = neuron >> 5
            pending[count] = row
            if far > 1:  # so that a short column is there when its block is complete
                rows.ask(row, record_bytes - (row - base - neuron * record_bytes))
            for b in range(batch):
                factors[count, b] = gates[b] if active[b, k] else np.float32(0)
            count += 1
            continue
        if tokens == 1:
            rows.axpy(down_mark, row, gates[0], partial_data, num, next_record)
            continue
        rows.unpack(down_mark, row, wide, num)
        for b in range(batch):
            if active[b, k]:
                rows.axpy(_MARK_F32, wide, gates[b], partial_data + b * partial_bytes, num, wide)
    if count > 0:
        _add_pending(down_mark, width, pending, factors, count, block, scales, minima, partial)
    # numba frees an array after its last use by name: these keep the memory behind addresses alive.
    wide_rows[0], pending[0], factors[0, 0], gates[0], ups[0] = 0, 0, 0, 0, 0


@kernel()
def prepare(x, mark, width, inputs):
    """Write tokens x [B, D] to the scratch as rows of this mark read them."""
    if x.shape[0] < len(width):
        inputs[:] = 0
    rows.prepare(mark, width, x.ctypes.data, x.shape[0], x.shape[1], inputs.ctypes.data)


@kernel()
def _ffn_share(
    inputs, batch, num, records, gated, mark, width, down_mark, row_bytes, biases, scales, minima, ids, chunk, rule,
    threshold, partials, out, active, counters,
):  # fmt: skip
    """One thread's share: sums over chunks of neurons, then the sum of these, token by token."""
    chunks = partials.shape[0]
    c = crew.take(counters, 0)
    while c < chunks:
        _ffn_chunk(
            inputs, batch, num, records, gated, mark, width, down_mark, row_bytes, biases, scales, minima,
            ids, c * chunk, min((c + 1) * chunk, ids.shape[0]), rule, threshold, partials[c], active,
        )  # fmt: skip
        crew.finish(counters, 0)
        c = crew.take(counters, 0)
    crew.wait(counters, 0, chunks)
    b = crew.take(counters, 1)
    while b < batch:
        out[b] = 0
        for c in range(chunks):
            for d in range(num):
                out[b, d] += partials[c, b, d]
        b = crew.take(counters, 1)


@kernel(parallel=True)
def ffn(
    x, inputs, records, gated, mark, width, down_mark, row_bytes, biases, scales, minima, ids, chunk, rule, threshold,
    partials, out, active, counters, helpers,
):  # fmt: skip
    prepare(x, mark, width, inputs)
    crew.clear(counters)
    for _ in prange(helpers):
        _ffn_share(
            inputs, x.shape[0], x.shape[1], records, gated, mark, width, down_mark, row_bytes, biases, scales, minima,
            ids, chunk, rule, threshold, partials, out, active, counters,
        )  # fmt: skip


@kernel()
def matvec_chunk(inputs, num, matrix, mark, width, first, last, out):
    """Multiply rows first:last of the matrix with every prepared token; out is [B, rows]."""
    products = np.empty(len(width), np.float32)
    for v in range(first, last):
        row = matrix.ctypes.data + v * matrix.shape[1]
        following = row + max(matrix.shape[1], _FAR_BYTES)
        rows.dots(mark, width, row, inputs.ctypes.data, num, following, products.ctypes.data)
        for b in range(out.shape[0]):
            out[b, v] = products[b]
    products[0] = 0  # keeps the scratch alive, as in _ffn_chunk


@kernel()
def product_share(inputs, num, matrix, mark, width, chunk, out, counters, stage):
    """One thread's share of a product: chunks of the matrix's rows, until none is left."""
    num_rows = matrix.shape[0]
    chunks = (num_rows + chunk - 1) // chunk
    c = crew.take(counters, stage)
    while c < chunks:
        matvec_chunk(inputs, num, matrix, mark, width, c * chunk, min((c + 1) * chunk, num_rows), out)
        crew.finish(counters, stage)
        c = crew.take(counters, stage)
    crew.wait(counters, stage, chunks)


@kernel(parallel=True)
def matvec(x, inputs, matrix, mark, width, chunk, out, counters, helpers):
    prepare(x, mark, width, inputs)
    crew.clear(counters)
    for _ in prange(helpers):
        product_share(inputs, x.shape[1], matrix, mark, width, chunk, out, counters, 0)
