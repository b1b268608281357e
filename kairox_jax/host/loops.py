"""Compiled loops over chunks of neurons and of rows. Arguments are not checked here: call ``kernels``."""

from __future__ import annotations

import numpy as np
from numba import prange

from kairox_jax.host import crew, rows
from kairox_jax.host.chunk import FAR_BYTES, SIDE_BYTES, batch_chunk, token_chunk
from kairox_jax.host.compile import kernel

_SIDE_BY_SIDE, _ALONE = rows.SIDE_BY_SIDE, rows.ALONE
SLICE = 512  # columns of the output that one thread adds up


@kernel(inner=True)
def prepare(x, mark, width, inputs):
    """Write tokens x [B, D] to the scratch as rows of this mark read them."""
    if x.shape[0] < len(width):
        inputs[:] = 0
    rows.prepare(mark, width, x.ctypes.data, x.shape[0], x.shape[1], inputs.ctypes.data)


@kernel(inner=True)
def ffn_share(
    inputs, batch, num, records, gated, mark, width, down_mark, row_bytes, biases, scales, minima, ids, chunk,
    rule, threshold, partials, slots, out, active, counters, stage, number,
):  # fmt: skip
    """One thread's share: sums over chunks of neurons, then the sums of these in the chunks' order; two stages.

    A thread writes to partials of its own, by its number, the same ones in each call: they stay in its cache.
    """
    chunks = slots.shape[0]
    used = chunks * number
    c = crew.take(counters, stage)
    while c < chunks:
        begin, end = c * chunk, min((c + 1) * chunk, ids.shape[0])
        if len(width) == 1:
            token_chunk(
                inputs, num, records, gated, mark, width, down_mark, row_bytes, biases, scales, minima, ids,
                begin, end, rule, threshold, partials[used], active,
            )  # fmt: skip
        else:
            batch_chunk(
                inputs, batch, num, records, gated, mark, width, down_mark, row_bytes, biases, scales, minima, ids,
                begin, end, rule, threshold, partials[used], active,
            )  # fmt: skip
        slots[c] = used
        used += 1
        crew.finish(counters, stage)
        c = crew.take(counters, stage)
    crew.wait(counters, stage, chunks)
    slices = (num + SLICE - 1) // SLICE
    task = crew.take(counters, stage + 1)
    while task < batch * slices:
        b, begin = task // slices, task % slices * SLICE
        place = 4 * (b * partials.shape[2] + begin)
        rows.add_up(
            slots.ctypes.data, chunks, partials.ctypes.data + place, 4 * partials.shape[1] * partials.shape[2],
            out.ctypes.data + 4 * (b * num + begin), min(SLICE, num - begin),
        )  # fmt: skip
        crew.finish(counters, stage + 1)
        task = crew.take(counters, stage + 1)


@kernel(parallel=True)
def ffn(
    x, inputs, records, gated, mark, width, down_mark, row_bytes, biases, scales, minima, ids, chunk, rule,
    threshold, partials, slots, out, active, counters, helpers,
):  # fmt: skip
    prepare(x, mark, width, inputs)
    crew.clear(counters)
    for _ in prange(helpers):
        # A number for each thread: prange's own has another type, which would be compiled twice.
        ffn_share(
            inputs, x.shape[0], x.shape[1], records, gated, mark, width, down_mark, row_bytes, biases, scales,
            minima, ids, chunk, rule, threshold, partials, slots, out, active, counters, 0, crew.take(counters, 2),
        )  # fmt: skip


@kernel(inner=True)
def matvec_chunk(inputs, num, matrix, mark, width, side, first, last, out):
    """Multiply rows first:last of the matrix with every prepared token; out is [B, rows]."""
    group = len(side)
    further = max(group * matrix.shape[1], SIDE_BYTES if group > 1 else FAR_BYTES)
    listed, asked = np.empty(group, np.int64), np.empty(group, np.int64)
    products = np.empty((group, len(width)), np.float32)
    for v in range(first, last, group):
        for r in range(group):
            listed[r] = matrix.ctypes.data + min(v + r, last - 1) * matrix.shape[1]
            asked[r] = listed[r] + further
        rows.dots(
            mark,
            width,
            side,
            listed.ctypes.data,
            asked.ctypes.data,
            inputs.ctypes.data,
            num,
            products.ctypes.data,
        )
        for r in range(group):
            for b in range(out.shape[0]):
                out[b, min(v + r, last - 1)] = products[r, b]


@kernel(inner=True)
def product_share(inputs, num, matrix, mark, width, chunk, out, counters, stage):
    """One thread's share of a product: chunks of the matrix's rows, until none is left."""
    num_rows = matrix.shape[0]
    chunks = (num_rows + chunk - 1) // chunk
    c = crew.take(counters, stage)
    while c < chunks:
        begin, end = c * chunk, min((c + 1) * chunk, num_rows)
        if len(width) == 1:
            matvec_chunk(inputs, num, matrix, mark, width, _SIDE_BY_SIDE, begin, end, out)
        else:
            matvec_chunk(inputs, num, matrix, mark, width, _ALONE, begin, end, out)
        crew.finish(counters, stage)
        c = crew.take(counters, stage)
    crew.wait(counters, stage, chunks)


@kernel(parallel=True)
def matvec(x, inputs, matrix, mark, width, chunk, out, counters, helpers):
    prepare(x, mark, width, inputs)
    crew.clear(counters)
    for _ in prange(helpers):
        product_share(inputs, x.shape[1], matrix, mark, width, chunk, out, counters, 0)
