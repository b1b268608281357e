"""Compiled loops over the neurons of a chunk: gate, up, rule and down while a record is in cache.

Arguments are not checked here: call ``kernels``.
"""

from __future__ import annotations

import numpy as np

from kairox_jax.host import columns, decode, rows
from kairox_jax.host.compile import kernel
from kairox_jax.host.exponential import exp
from kairox_jax.host.rules import Rule

_MARK_F32, _FIRST_COLUMN, _SIDE_BY_SIDE, _ALONE = (
    rows.MARK_F32,
    decode.FIRST_COLUMN,
    rows.SIDE_BY_SIDE,
    rows.ALONE,
)
_GROUP = len(rows.SIDE_BY_SIDE)
_MAX_PENDING = columns.MAX_NEURONS
_TOGETHER = 16  # neurons of several tokens: their records stay in the first cache
_RAMP_SLOPE = np.float32(3)  # as models.rules.RAMP_SLOPE: a value counts in part up to 1.5 thresholds
# Memory is asked so far ahead of rows that are read one after the other, and of some that are read side by side.
FAR_BYTES, SIDE_BYTES = 4096, 9216
_SILU, _RELU2, _FATRELU, _DRELU = int(Rule.SILU), int(Rule.RELU2), int(Rule.FATRELU), int(Rule.DRELU)


@kernel(inner=True)
def _passes(rule, threshold, value):
    """Say whether a gate (ungated: an up value) lets its neuron through. NaN does: the output shows it."""
    if rule == _SILU:
        return True
    return not value <= (threshold if rule == _FATRELU else np.float32(0))


@kernel(inner=True)
def activate(rule, threshold, gated, gates, ups, zs, fired):
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
def _add_four(mark, down_rows, zs, count, asked, partial, num):
    """Add down rows that wait to the sum, a group at most; return how many are left, moved to the front."""
    for r in range(count, _GROUP):
        down_rows[r], zs[r] = down_rows[count - 1], np.float32(0)
    rows.axpy(
        mark,
        _SIDE_BY_SIDE,
        down_rows.ctypes.data,
        asked.ctypes.data,
        zs.ctypes.data,
        partial.ctypes.data,
        num,
    )
    for r in range(_GROUP, count):
        down_rows[r - _GROUP], zs[r - _GROUP] = down_rows[r], zs[r]
    return max(0, count - _GROUP)


@kernel(inner=True)
def token_chunk(
    x, num, records, gated, mark, width, down_mark, row_bytes, biases, scales, minima, ids, first, last, rule,
    threshold, partial, active,
):  # fmt: skip
    """Add up neurons ids[first:last] for one token into partial [1, at least D]; x is what ``prepare`` filled.

    Several rows are read side by side: gate rows, then up rows of those that pass, then down rows of the active; what
    does not fill a group waits. Meanwhile memory is asked for the same rows of a group that follows some kB later, or
    where few neurons of the last group were needed whole, for its first rows alone and for what these few need.
    """
    base, record_bytes = records.ctypes.data, records.shape[1]
    first_rows, far_rows = np.empty(_GROUP, np.int64), np.empty(_GROUP, np.int64)
    up_rows, places = np.empty(2 * _GROUP, np.int64), np.empty(2 * _GROUP, np.int64)  # places in ids
    down_rows, zs = np.empty(2 * _GROUP, np.int64), np.zeros(2 * _GROUP, np.float32)
    asked, products = np.empty(_GROUP, np.int64), np.zeros(_GROUP, np.float32)
    gates, values, fired = (
        np.zeros(2 * _GROUP, np.float32),
        np.zeros(_GROUP, np.float32),
        np.zeros(_GROUP, np.uint8),
    )
    pending, factors = np.empty(_MAX_PENDING, np.int64), np.zeros((_MAX_PENDING, 1), np.float32)
    ups, downs, count, block = 0, 0, 0, np.int64(-1)  # rows that wait
    partial[:] = 0
    has_rows, most = len(down_mark) < _FIRST_COLUMN, gated and rule == _SILU
    far = max(_GROUP, SIDE_BYTES // record_bytes // _GROUP * _GROUP)  # neurons
    for begin in range(first, last, _GROUP):
        size, is_last = min(_GROUP, last - begin), begin + _GROUP >= last
        for r in range(_GROUP):
            first_rows[r] = base + np.int64(ids[min(begin + r, last - 1)]) * record_bytes
            far_rows[r] = base + np.int64(ids[min(begin + far + r, last - 1)]) * record_bytes
        if gated:
            rows.dots(
                mark, width, _SIDE_BY_SIDE, first_rows.ctypes.data, far_rows.ctypes.data, x.ctypes.data, num,
                products.ctypes.data,
            )  # fmt: skip
        passed = 0
        for r in range(size):
            active[0, begin + r] = 0
            gates[ups] = products[r]
            if gated and biases.shape[0] > 0:
                gates[ups] += biases[ids[begin + r], 0]
            if gated and not _passes(rule, threshold, gates[ups]):
                continue
            up_rows[ups], places[ups] = first_rows[r] + (row_bytes if gated else 0), begin + r
            if gated and not most:
                rows.ask(up_rows[ups], row_bytes)
            ups += 1
            passed += 1
        if gated:
            most = 2 * passed > size
        while ups >= _GROUP or (is_last and ups > 0):
            size = min(ups, _GROUP)
            for r in range(size, _GROUP):
                up_rows[r] = up_rows[size - 1]
            for r in range(_GROUP):
                if most:
                    asked[r] = far_rows[r] + (row_bytes if gated else 0)
                else:
                    asked[r] = up_rows[r] + row_bytes if has_rows and gated else far_rows[r]
            rows.dots(
                mark, width, _SIDE_BY_SIDE, up_rows.ctypes.data, asked.ctypes.data, x.ctypes.data, num,
                products.ctypes.data,
            )  # fmt: skip
            if biases.shape[0] > 0:
                for r in range(size):
                    products[r] += biases[ids[places[r]], biases.shape[1] - 1]
            activate(rule, threshold, gated, gates, products, values, fired)
            passed = 0
            for r in range(size):
                if fired[r] == 0:
                    continue
                active[0, places[r]] = 1
                passed += 1
                neuron, row = np.int64(ids[places[r]]), up_rows[r] + row_bytes
                if has_rows:
                    if not gated and not most:
                        rows.ask(row, row_bytes)
                    down_rows[downs], zs[downs] = row, values[r]
                    downs += 1
                    continue
                if count > 0 and (neuron >> 5 != block or count == _MAX_PENDING):
                    _add_pending(down_mark, width, pending, factors, count, block, scales, minima, partial)
                    count = 0
                block, pending[count], factors[count, 0] = neuron >> 5, row, values[r]
                count += 1
                rows.ask(row, columns.AHEAD_BYTES)  # the rest is asked for as its beginning is read
            if not gated:
                most = 2 * passed > size
            for r in range(_GROUP, ups):
                up_rows[r - _GROUP], places[r - _GROUP], gates[r - _GROUP] = up_rows[r], places[r], gates[r]
            ups -= size
            if downs >= _GROUP:
                for r in range(_GROUP):
                    asked[r] = far_rows[r] + (2 if gated else 1) * row_bytes if most else down_rows[r]
                downs = _add_four(down_mark, down_rows, zs, downs, asked, partial, num)
    if downs > 0:
        _add_four(down_mark, down_rows, zs, downs, down_rows, partial, num)
    if count > 0:
        _add_pending(down_mark, width, pending, factors, count, block, scales, minima, partial)


@kernel(inner=True)
def batch_chunk(
    x, batch, num, records, gated, mark, width, down_mark, row_bytes, biases, scales, minima, ids, first, last, rule,
    threshold, partial, active,
):  # fmt: skip
    """Add up neurons ids[first:last] for several tokens into partial [width, at least D]; see ``token_chunk``.

    Some neurons at a time, which stay in cache: the rule works on the products of all of them with all tokens.
    """
    tokens = len(width)
    wide, listed, asked = np.empty(num, np.float32), np.empty(1, np.int64), np.empty(1, np.int64)
    base, record_bytes = records.ctypes.data, records.shape[1]
    rows_of, places = np.empty(_TOGETHER, np.int64), np.empty(_TOGETHER, np.int64)  # of neurons that pass
    gates, ups = np.zeros(_TOGETHER * tokens, np.float32), np.zeros(_TOGETHER * tokens, np.float32)
    zs, fired = np.empty(_TOGETHER * tokens, np.float32), np.empty(_TOGETHER * tokens, np.uint8)
    pending, factors = np.empty(_MAX_PENDING, np.int64), np.zeros((_MAX_PENDING, tokens), np.float32)
    count, block, any_passes = 0, np.int64(-1), True
    partial[:] = 0
    far = max(1, FAR_BYTES // record_bytes)  # records
    for begin in range(first, last, _TOGETHER):
        passed = 0
        for k in range(begin, min(begin + _TOGETHER, last)):
            neuron, place = np.int64(ids[k]), passed * tokens
            row = base + neuron * record_bytes
            rows_of[passed], places[passed] = row, k
            if not gated:
                passed += 1
                continue
            # What is read after a long gate row is guessed from the neuron before.
            further = base + np.int64(ids[min(k + far, last - 1)]) * record_bytes
            listed[0], asked[0] = row, row + row_bytes if any_passes and far == 1 else further
            rows.dots(
                mark, width, _ALONE, listed.ctypes.data, asked.ctypes.data, x.ctypes.data, num,
                gates.ctypes.data + 4 * place,
            )  # fmt: skip
            any_passes = rule == _SILU
            if biases.shape[0] > 0:
                for b in range(tokens):
                    gates[place + b] += biases[neuron, 0]
            if not any_passes:
                for b in range(batch):
                    any_passes |= _passes(rule, threshold, gates[place + b])
            if any_passes:
                passed += 1
                continue
            for b in range(batch):
                active[b, k] = 0
        for n in range(passed):
            listed[0] = rows_of[n] + (row_bytes if gated else 0)
            asked[0] = listed[0] + row_bytes
            rows.dots(
                mark, width, _ALONE, listed.ctypes.data, asked.ctypes.data, x.ctypes.data, num,
                ups.ctypes.data + 4 * n * tokens,
            )  # fmt: skip
            if biases.shape[0] > 0:
                for b in range(tokens):
                    ups[n * tokens + b] += biases[ids[places[n]], biases.shape[1] - 1]
        some = passed * tokens
        activate(rule, threshold, gated, gates[:some], ups[:some], zs[:some], fired[:some])
        for n in range(passed):
            k, any_fires = places[n], False
            for b in range(batch):
                active[b, k] = fired[n * tokens + b]
                any_fires |= fired[n * tokens + b] != 0
            if not any_fires:
                continue
            neuron, row = np.int64(ids[k]), rows_of[n] + (2 if gated else 1) * row_bytes
            if len(down_mark) >= _FIRST_COLUMN:
                if count > 0 and (neuron >> 5 != block or count == _MAX_PENDING):
                    _add_pending(down_mark, width, pending, factors, count, block, scales, minima, partial)
                    count = 0
                block, pending[count] = neuron >> 5, row
                for b in range(batch):
                    factors[count, b] = zs[n * tokens + b]
                count += 1
                continue
            rows.unpack(down_mark, row, wide.ctypes.data, num)
            listed[0] = wide.ctypes.data
            for b in range(batch):
                if fired[n * tokens + b]:
                    rows.axpy(
                        _MARK_F32, _ALONE, listed.ctypes.data, listed.ctypes.data,
                        zs.ctypes.data + 4 * (n * tokens + b), partial.ctypes.data + 4 * b * partial.shape[1], num,
                    )  # fmt: skip
    if count > 0:
        _add_pending(down_mark, width, pending, factors, count, block, scales, minima, partial)
