"""Compiled loops over the tokens of a prompt: an FFN, of which every neuron is computed, and products with a matrix.

Each weight is unpacked once for all tokens. Arguments are not checked here: call ``kernels`` or ``products``.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from kairox_jax.host import columns, crew, decode, rows, tiles
from kairox_jax.host.chunk import activate
from kairox_jax.host.compile import kernel

_FIRST_COLUMN, _ROWS, _TOKENS = decode.FIRST_COLUMN, tiles.ROWS, tiles.TOKENS
_ROW_BY_ROW, _INPUT_BY_INPUT = tiles.ROW_BY_ROW, tiles.INPUT_BY_INPUT
# What a task unpacks stays in the second cache beside the tokens: neurons whose gate and up rows are multiplied, and
# of the down columns so many weights (a cache line of 4-bit ones), of so many neurons at a time.
NEURONS, WEIGHTS, _DEPTH = 32, 96, 128


@kernel(inner=True)
def group_tokens(x, num, group, tokens):
    """Write a group of TOKENS rows of x [T, num] to floats [groups, num, TOKENS], zeros beyond the last."""
    count = min(_TOKENS, x.shape[0] - group * _TOKENS)
    into = tokens[group]
    for t in range(count, _TOKENS):
        for d in range(num):
            into[d * _TOKENS + t] = np.float32(0)
    for t in range(count):
        row = x[group * _TOKENS + t]
        for d in range(num):
            into[d * _TOKENS + t] = row[d]


@kernel(inner=True)
def _group_share(x, tokens, counters, stage):
    """One thread's share of grouping; returns when all is done."""
    groups = (x.shape[0] + _TOKENS - 1) // _TOKENS
    group = crew.take(counters, stage)
    while group < groups:
        group_tokens(x, x.shape[1], group, tokens)
        crew.finish(counters, stage)
        group = crew.take(counters, stage)
    crew.wait(counters, stage, groups)


@kernel(inner=True)
def _multiply(matrix, width, num, inputs, present, count, sums):
    """Multiply ``count`` unpacked rows of ``width`` floats with a group of tokens into floats [NEURONS, TOKENS]."""
    for begin in range(0, num, _DEPTH):  # so much of the tokens stays in the first cache for all rows
        for row in range(0, count, _ROWS):
            tiles.add_products(
                _ROW_BY_ROW, matrix + 4 * (width * row + begin), 4 * width, inputs + 4 * _TOKENS * begin,
                present, min(_DEPTH, num - begin), sums + 4 * _TOKENS * row,
            )  # fmt: skip


@kernel(inner=True)
def _rows_task(
    tokens, num_tokens, num, records, gated, mark, row_bytes, biases, first, last, rule, threshold, zs, matrices,
    products, fired,
):  # fmt: skip
    """Compute neurons first:last for all tokens [groups, D * TOKENS] into zs [groups, neurons * TOKENS]."""
    parts, width = 2 if gated else 1, matrices.shape[2]
    # Addresses, because each view of an array would count its references, one processor after the other.
    base, into = records.ctypes.data, matrices.ctypes.data
    for neuron in range(first, last):
        for part in range(parts):
            row = base + neuron * records.shape[1] + part * row_bytes
            rows.unpack(mark, row, into + 4 * width * (part * NEURONS + neuron - first), num)
    for group in range(tokens.shape[0]):
        products[:] = 0
        inputs = tokens.ctypes.data + 4 * tokens.shape[1] * group
        for part in range(parts):
            place = part * NEURONS
            _multiply(
                into + 4 * width * place, width, num, inputs, num_tokens - group * _TOKENS, last - first,
                products.ctypes.data + 4 * _TOKENS * place,
            )  # fmt: skip
        if biases.shape[0] > 0:
            for part in range(parts):
                for place in range((last - first) * _TOKENS):
                    products[part, place] += biases[first + place // _TOKENS, part]
        values = zs[
            group, first * _TOKENS : (first + NEURONS) * _TOKENS
        ]  # the last task's end does not count
        activate(rule, threshold, gated, products[0], products[parts - 1], values, fired)


@kernel(inner=True)
def _columns_task(
    zs, num_neurons, records, down_mark, down_at, block_bytes, scales, minima, first, last, matrix, sums, x
):
    """Add what the neurons give to weights first:last of the residual stream x [T, D]; first is a multiple of 32."""
    sums[:] = 0
    size, block = last - first, first >> 5
    base, into, totals = (
        records.ctypes.data + down_at + block * block_bytes,
        matrix.ctypes.data,
        sums.ctypes.data,
    )
    for begin in range(0, num_neurons, _DEPTH):
        count = min(_DEPTH, num_neurons - begin)
        for k in range(count):
            column = base + (begin + k) * records.shape[1]
            if len(down_mark) < _FIRST_COLUMN:
                rows.unpack(down_mark, column, into + 4 * WEIGHTS * k, size)
                continue
            table = ((begin + k) >> 5) * 2 * scales.shape[1] + 64 * block  # bytes
            least = minima.ctypes.data + table if minima.shape[0] > 0 else 0
            columns.unpack_column(
                down_mark, column, scales.ctypes.data + table, least, into + 4 * WEIGHTS * k, size
            )
        for group in range(zs.shape[0]):
            for weight in range(0, size, _ROWS):
                tiles.add_products(
                    _INPUT_BY_INPUT, into + 4 * weight, 4 * WEIGHTS,
                    zs.ctypes.data + 4 * (zs.shape[1] * group + _TOKENS * begin), x.shape[0] - group * _TOKENS, count,
                    totals + 4 * _TOKENS * (WEIGHTS * group + weight),
                )  # fmt: skip
    for t in range(x.shape[0]):
        for weight in range(size):
            x[t, first + weight] += sums[t // _TOKENS, weight, t % _TOKENS]


@kernel(inner=True)
def _share(
    h, tokens, num, records, gated, mark, down_mark, row_bytes, down_at, block_bytes, biases, scales, minima, rule,
    threshold, zs, x, counters,
):  # fmt: skip
    """One thread's share: the tokens' grouping, neurons until none is left, then weights of their sum."""
    num_neurons = records.shape[0]
    _group_share(h, tokens, counters, 2)
    matrices = np.empty((2 if gated else 1, NEURONS, (num + 15) // 16 * 16), np.float32)
    products, fired = np.empty((2, NEURONS * _TOKENS), np.float32), np.empty(NEURONS * _TOKENS, np.uint8)
    tasks = (num_neurons + NEURONS - 1) // NEURONS
    task = crew.take(counters, 0)
    while task < tasks:
        _rows_task(
            tokens, x.shape[0], num, records, gated, mark, row_bytes, biases, task * NEURONS,
            min((task + 1) * NEURONS, num_neurons), rule, threshold, zs, matrices, products, fired,
        )  # fmt: skip
        crew.finish(counters, 0)
        task = crew.take(counters, 0)
    crew.wait(counters, 0, tasks)
    matrix, sums = (
        np.empty((_DEPTH, WEIGHTS), np.float32),
        np.empty((zs.shape[0], WEIGHTS, _TOKENS), np.float32),
    )
    task = crew.take(counters, 1)
    while task * WEIGHTS < num:
        _columns_task(
            zs, num_neurons, records, down_mark, down_at, block_bytes, scales, minima, task * WEIGHTS,
            min((task + 1) * WEIGHTS, num), matrix, sums, x,
        )  # fmt: skip
        task = crew.take(counters, 1)


@kernel(parallel=True)
def ffn(
    h, tokens, num, records, gated, mark, down_mark, row_bytes, down_at, block_bytes, biases, scales, minima, rule,
    threshold, zs, x, counters, helpers,
):  # fmt: skip
    crew.clear(counters)
    for _ in prange(helpers):
        _share(
            h, tokens, num, records, gated, mark, down_mark, row_bytes, down_at, block_bytes, biases, scales, minima,
            rule, threshold, zs, x, counters,
        )  # fmt: skip


@kernel(inner=True)
def product_share(tokens, num, matrix, mark, out, counters, stage):
    """One thread's share of a product, rows of the matrix [V, bytes]; out is [T, V]. Returns when all is done."""
    width, num_rows = (num + 15) // 16 * 16, matrix.shape[0]
    unpacked, products = np.empty((NEURONS, width), np.float32), np.empty((NEURONS, _TOKENS), np.float32)
    task = crew.take(counters, stage)
    while task * NEURONS < num_rows:
        first = task * NEURONS
        count = min(NEURONS, num_rows - first)
        for row in range(count):
            at = matrix.ctypes.data + (first + row) * matrix.shape[1]
            rows.unpack(mark, at, unpacked.ctypes.data + 4 * width * row, num)
        for group in range(tokens.shape[0]):
            products[:] = 0
            inputs = tokens.ctypes.data + 4 * tokens.shape[1] * group
            present = out.shape[0] - group * _TOKENS
            _multiply(unpacked.ctypes.data, width, num, inputs, present, count, products.ctypes.data)
            for t in range(min(_TOKENS, present)):
                for row in range(count):
                    out[group * _TOKENS + t, first + row] = products[row, t]
        crew.finish(counters, stage)
        task = crew.take(counters, stage)
    crew.wait(counters, stage, (num_rows + NEURONS - 1) // NEURONS)


@kernel(parallel=True)
def matmul(x, tokens, matrix, mark, out, counters, helpers):
    crew.clear(counters)
    for _ in prange(helpers):
        _group_share(x, tokens, counters, 1)
        product_share(tokens, x.shape[1], matrix, mark, out, counters, 0)
