"""Compiled loops over the neurons of a chunk: gate, up, rule and down while a record is in cache.

Arguments are not checked here: call ``kernels``.
"""

from __future__ import annotations

import numpy as np

from kairox_jax.host import columns, decode, rows
from kairox_jax.host.compile import kernel
from kairox_jax.host.exponential import exp
from kairox_jax.host.rules import Rule

_MARK_F32, _FIRST_COLUMN, _ALONE = rows.MARK_F32, decode.FIRST_COLUMN, rows.ALONE
_PAIR = rows.PAIR
_MAX_PENDING = columns.MAX_NEURONS
_RAMP_SLOPE = np.float32(3)  # as models.rules.RAMP_SLOPE: a value counts in part up to 1.5 thresholds
# So much of a record is asked for before its first row is read; a shorter one whole.
_FIRST_BYTES = 512
_SHORT_BYTES = 2048
# The beginning of a short record is asked for so far ahead: it takes less time than memory to answer.
FAR_BYTES = 4096
_SILU, _RELU2, _FATRELU, _DRELU = int(Rule.SILU), int(Rule.RELU2), int(Rule.FATRELU), int(Rule.DRELU)


@kernel(inner=True)
def _passes(rule, threshold, value):
    """Say whether a gate (ungated: an up value) lets its neuron through. NaN does: the output shows it."""
    if rule == _SILU:
        return True
    return not value <= (threshold if rule == _FATRELU else np.float32(0))


@kernel(inner=True)
def _activate(rule, threshold, gated, gates, ups, zs, fired):
    """Turn the gates and ups of a neuron's tokens into what it adds, and say for which of them it is active.

    Loops without branches and calls, so that they become vector code. NaN is active: the output shows it.
    """
    limit = threshold if rule == _FATRELU else np.float32(0)
    if rule == _SILU:
        for b in range(ups.shape[0]):
            driver = gates[b] if gated else ups[b]
            z = driver / (np.float32(1) + exp(-driver))
            z = z * ups[b] if gated else z
            size = abs(z)
            part = _RAMP_SLOPE * (size - threshold)
            part = part if part < size else size
            fires = not size <= threshold
            zs[b] = (part if z >= 0 else -part) if fires else np.float32(0)
            fired[b] = fires
        return
    for b in range(ups.shape[0]):
        driver, up = gates[b] if gated else ups[b], ups[b]
        fires = not driver <= limit
        if rule == _DRELU:
            fires = fires and not up <= np.float32(0)
        z = driver * up if gated or rule == _RELU2 else up
        z = driver * z if gated and rule == _RELU2 else z
        zs[b] = z if fires else np.float32(0)
        fired[b] = fires


@kernel(inner=True)
def _add_pending(mark, width, pending, factors, count, block, scales, minima, partial):
    """Add the pending columns of one block of neurons to every token's sum."""
    least = minima[block].ctypes.data if minima.shape[0] > 0 else 0
    columns.add_columns(
        mark, width, pending.ctypes.data, factors.ctypes.data, count, scales[block].ctypes.data, least,
        partial.ctypes.data, 4 * partial.shape[1], partial.shape[1] // 32,
    )  # fmt: skip


@kernel(inner=True)
def dots_of(mark, width, side, listed, count, x, num, jump, products):
    """Multiply the first ``count`` listed rows, at most as many as are read side by side, with every token."""
    for r in range(count, len(side)):
        listed[r] = listed[count - 1]
    rows.dots(mark, width, side, listed.ctypes.data, x.ctypes.data, num, np.int64(jump), products.ctypes.data)


@kernel(inner=True)
def side_chunk(
    x, num, records, gated, mark, width, side, down_mark, row_bytes, biases, scales, minima, ids, first, last, rule,
    threshold, partial, active,
):  # fmt: skip
    """Do what ``ffn_chunk`` does for one token, reading several rows side by side.

    Gate rows first, then up rows of those that pass, then down rows of the active: what does not fill a group waits.
    """
    group = len(side)
    base, record_bytes = records.ctypes.data, records.shape[1]
    asked = record_bytes if record_bytes <= _SHORT_BYTES else _FIRST_BYTES
    gate_rows, up_rows, places = (
        np.empty(group, np.int64),
        np.empty(2 * group, np.int64),
        np.empty(2 * group, np.int64),  # in ids, of the rows in up_rows
    )
    down_rows, zs = np.empty(4 * group, np.int64), np.zeros(4 * group, np.float32)
    gates, products = np.zeros(2 * group, np.float32), np.zeros(group, np.float32)
    values, fired = np.zeros(group, np.float32), np.zeros(group, np.uint8)
    pending, factors = np.empty(_MAX_PENDING, np.int64), np.zeros((_MAX_PENDING, 1), np.float32)
    ups, downs, count, block = 0, 0, 0, np.int64(-1)  # rows that wait
    partial[:] = 0
    passes = True
    for begin in range(first, last, group):
        size, is_last = min(group, last - begin), begin + group >= last
        for r in range(size):
            gate_rows[r] = base + np.int64(ids[begin + r]) * record_bytes
        for k in range(begin + group, min(begin + 2 * group, last)):
            rows.ask(base + np.int64(ids[k]) * record_bytes, asked)
        if gated:  # what is read after the gate rows is guessed from the neuron before
            dots_of(mark, width, side, gate_rows, size, x, num, row_bytes if passes else 0, products)
        for r in range(size):
            active[0, begin + r] = 0
            gates[ups] = products[r]
            if gated and biases.shape[0] > 0:
                gates[ups] += biases[ids[begin + r], 0]
            passes = not gated or _passes(rule, threshold, gates[ups])
            if passes:
                up_rows[ups], places[ups] = gate_rows[r] + (row_bytes if gated else 0), begin + r
                ups += 1
        while ups >= group or (is_last and ups > 0):
            size = min(ups, group)
            dots_of(mark, width, side, up_rows, size, x, num, row_bytes, products)
            if biases.shape[0] > 0:
                for r in range(size):
                    products[r] += biases[ids[places[r]], biases.shape[1] - 1]
            _activate(rule, threshold, gated, gates, products, values, fired)
            for r in range(size):
                if fired[r] == 0:
                    continue
                active[0, places[r]] = 1
                neuron, row = np.int64(ids[places[r]]), up_rows[r] + row_bytes
                if len(down_mark) < _FIRST_COLUMN:
                    down_rows[downs], zs[downs] = row, values[r]
                    downs += 1
                    continue
                if count > 0 and (neuron >> 5 != block or count == _MAX_PENDING):
                    _add_pending(down_mark, width, pending, factors, count, block, scales, minima, partial)
                    count = 0
                block, pending[count], factors[count, 0] = neuron >> 5, row, values[r]
                count += 1
            for r in range(group, ups):
                up_rows[r - group], places[r - group], gates[r - group] = up_rows[r], places[r], gates[r]
            ups -= size
        while downs >= group or (is_last and downs > 0):
            for r in range(downs, group):
                down_rows[r], zs[r] = down_rows[downs - 1], np.float32(0)
            rows.axpy(down_mark, side, down_rows.ctypes.data, zs.ctypes.data, partial.ctypes.data, num)
            for r in range(group, downs):
                down_rows[r - group], zs[r - group] = down_rows[r], zs[r]
            downs = max(0, downs - group)
    if count > 0:
        _add_pending(down_mark, width, pending, factors, count, block, scales, minima, partial)


@kernel(inner=True)
def ffn_chunk(
    x, batch, num, records, gated, mark, width, down_mark, row_bytes, biases, scales, minima, ids, first, last, rule,
    threshold, partial, active,
):  # fmt: skip
    """Add up neurons ids[first:last] into partial [width, at least D]; x is the scratch that ``prepare`` filled.

    Rows are read while the record is in cache. Columns that share scales wait until the block of neurons changes.
    """
    tokens = len(width)
    wide, listed = np.empty(num if tokens > 1 else 1, np.float32), np.empty(1, np.int64)
    both, products = np.empty(2, np.int64), np.empty(2, np.float32)
    base, record_bytes = records.ctypes.data, records.shape[1]
    gates, ups = np.zeros(tokens, np.float32), np.empty(tokens, np.float32)
    zs, fired = np.empty(tokens, np.float32), np.empty(tokens, np.uint8)
    pending, factors = np.empty(_MAX_PENDING, np.int64), np.zeros((_MAX_PENDING, tokens), np.float32)
    count, block = 0, np.int64(-1)
    partial[:] = 0
    passed = True
    far = max(1, FAR_BYTES // record_bytes)  # records
    for k in range(first, last):
        neuron = np.int64(ids[k])
        row = base + neuron * record_bytes
        listed[0] = row
        jump = base + np.int64(ids[min(k + far, last - 1)]) * record_bytes - row  # to a record further on
        any_passes = False
        if tokens == 1 and gated and rule == _SILU:
            # Its value needs both rows: with int8 inputs 4.3 ms for the default model's, 5.6 one after the other.
            both[0], both[1] = row, row + row_bytes
            dots_of(mark, width, _PAIR, both, 2, x, num, row_bytes if far == 1 else jump, products)
            listed[0], gates[0], ups[0] = both[1], products[0], products[1]
            if biases.shape[0] > 0:
                gates[0] += biases[neuron, 0]
        elif gated:
            # What is read after the gate row is guessed from the neuron before.
            dots_of(mark, width, _ALONE, listed, 1, x, num, row_bytes if passed and far == 1 else jump, gates)
            for b in range(batch):
                if biases.shape[0] > 0:
                    gates[b] += biases[neuron, 0]
                any_passes |= _passes(rule, threshold, gates[b])
            listed[0] += row_bytes
            passed = any_passes
            if not any_passes:
                for b in range(batch):
                    active[b, k] = 0
                continue
        if tokens > 1 or not gated or rule != _SILU:
            dots_of(mark, width, _ALONE, listed, 1, x, num, row_bytes if far == 1 else jump, ups)
        if biases.shape[0] > 0:
            for b in range(batch):
                ups[b] += biases[neuron, biases.shape[1] - 1]
        _activate(rule, threshold, gated, gates, ups, zs, fired)
        any_passes = False
        for b in range(batch):
            active[b, k] = fired[b]
            any_passes |= fired[b] != 0
        if not any_passes:
            continue
        listed[0] += row_bytes
        if len(down_mark) >= _FIRST_COLUMN:
            if count > 0 and (neuron >> 5 != block or count == _MAX_PENDING):
                _add_pending(down_mark, width, pending, factors, count, block, scales, minima, partial)
                count = 0
            block = neuron >> 5
            pending[count] = listed[0]
            if far > 1:  # so that a short column is there when its block is complete
                rows.ask(listed[0], record_bytes - (listed[0] - row))
            for b in range(batch):
                factors[count, b] = zs[b]
            count += 1
            continue
        if tokens == 1:
            rows.axpy(down_mark, _ALONE, listed.ctypes.data, zs.ctypes.data, partial.ctypes.data, num)
            continue
        rows.unpack(down_mark, listed[0], wide.ctypes.data, num)
        listed[0] = wide.ctypes.data
        for b in range(batch):
            if active[b, k]:
                rows.axpy(
                    _MARK_F32, _ALONE, listed.ctypes.data, zs.ctypes.data + 4 * b,
                    partial.ctypes.data + 4 * b * partial.shape[1], num,
                )  # fmt: skip
    if count > 0:
        _add_pending(down_mark, width, pending, factors, count, block, scales, minima, partial)
