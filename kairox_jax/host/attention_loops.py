"""Compiled loops of the attention: norm, products, cache, heads, and the FFN's input. Call ``attention``."""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from kairox_jax.host.compile import kernel
from kairox_jax.host.crew import clear, finish, take, wait
from kairox_jax.host.heads import attend
from kairox_jax.host.loops import prepare, product_share

ROWS_PER_CHUNK = 96


@kernel(inner=True)
def norm_rows(x, scale, bias, eps, out):
    """Write the RMS norm of each row, or its layer norm where there is a bias."""
    size = x.shape[1]
    for b in range(x.shape[0]):
        mean = np.float32(0)
        if bias.shape[0] > 0:
            for d in range(size):
                mean += x[b, d]
            mean /= np.float32(size)
        total = np.float32(0)
        for d in range(size):
            total += (x[b, d] - mean) * (x[b, d] - mean)
        factor = np.float32(1) / np.float32(math.sqrt(total / size + eps))
        for d in range(size):
            out[b, d] = (x[b, d] - mean) * factor * scale[d]
    _add(bias, out)


@kernel(inner=True)
def _add(bias, out):
    """Add a bias to each row; an empty one does nothing."""
    for b in range(out.shape[0]):
        for d in range(bias.shape[0]):
            out[b, d] += bias[d]


@kernel(inner=True)
def _rotate(vector, cos, sin):
    """Turn the pairs (h, h + H/2) of one head in place."""
    half = cos.shape[0]
    for h in range(half):
        first, second = vector[h], vector[h + half]
        vector[h] = first * cos[h] - second * sin[h]
        vector[h + half] = second * cos[h] + first * sin[h]


@kernel(inner=True)
def _place(qkv, bqkv, cos, sin, keys, values, cache_row, position, heads):
    """Add one token's bias, turn its queries and keys, and put keys and values into the cache."""
    kv_heads, size = keys.shape[1], keys.shape[3]
    for d in range(bqkv.shape[0]):
        qkv[d] += bqkv[d]
    for head in range(heads + kv_heads):
        _rotate(qkv[head * size : (head + 1) * size], cos, sin)
    for head in range(kv_heads):
        key, value = (heads + head) * size, (heads + kv_heads + head) * size
        for h in range(size):  # slices that are assigned take seconds to compile
            keys[cache_row, head, position, h] = qkv[key + h]
            values[cache_row, head, position, h] = qkv[value + h]


@kernel(inner=True)
def _attend_task(task, span, qkv, keys, values, cache_rows, positions, window, scores, mixed):
    """Attend with ``span`` heads of one token that share their keys."""
    kv_heads, size = keys.shape[1], keys.shape[3]
    heads = mixed.shape[1] // size
    b, head = task * span // heads, task * span % heads
    seen = positions[b] + 1
    first = max(0, seen - window)
    attend(
        qkv[b, head * size : (head + span) * size],
        keys[cache_rows[b], head // (heads // kv_heads), first:seen],
        values[cache_rows[b], head // (heads // kv_heads), first:seen],
        scores,
        mixed[b, head * size : (head + span) * size],
    )


@kernel(inner=True)
def mix_share(
    qkv, bqkv, cos, sin, keys, values, cache_rows, positions, window, mixed, counters, stage, helpers
):
    """One thread's share of the way from products to mixed heads, tokens [n, rows]; two stages, and it waits for both.

    Every token's keys and values are in the cache before any token attends, so that tokens may follow each other.
    """
    batch, size = qkv.shape[0], keys.shape[3]
    heads, kv_heads = mixed.shape[1] // size, keys.shape[1]
    b = take(counters, stage)
    while b < batch:
        _place(qkv[b], bqkv, cos[b], sin[b], keys, values, cache_rows[b], positions[b], heads)
        finish(counters, stage)
        b = take(counters, stage)
    wait(counters, stage, batch)
    # Heads that share keys read them together, unless threads would be without work.
    span = heads // kv_heads if batch * kv_heads >= helpers else 1
    length = np.int64(0)
    for b in range(batch):
        length = max(length, np.int64(positions[b]) + 1)
    scores = np.empty((span, length), np.float32)
    task = take(counters, stage + 1)
    while task < batch * heads // span:
        _attend_task(task, span, qkv, keys, values, cache_rows, positions, window, scores, mixed)
        finish(counters, stage + 1)
        task = take(counters, stage + 1)
    wait(counters, stage + 1, batch * heads // span)


@kernel(inner=True)
def merge(x, attended, bo, norm, norm_bias, eps, parallel_block, h):
    """Add the attention to the residual stream, and normalise the FFN's input."""
    _add(bo, attended)
    if parallel_block:
        norm_rows(x, norm, norm_bias, eps, h)
    for b in range(x.shape[0]):
        for d in range(x.shape[1]):
            x[b, d] += attended[b, d]
    if not parallel_block:
        norm_rows(x, norm, norm_bias, eps, h)


@kernel(inner=True)
def _share(
    num, wqkv, wqkv_mark, bqkv, wo, wo_mark, cos, sin, keys, values, cache_rows, positions, window, width, inputs, qkv,
    mixed, attended, counters, helpers,
):  # fmt: skip
    """One thread's share of a block, from the prepared input to the output product."""
    product_share(inputs, num, wqkv, wqkv_mark, width, ROWS_PER_CHUNK, qkv, counters, 0)
    mix_share(qkv, bqkv, cos, sin, keys, values, cache_rows, positions, window, mixed, counters, 1, helpers)
    if take(counters, 3) == 0:
        prepare(mixed, wo_mark, width, inputs)
        finish(counters, 3)
    wait(counters, 3, 1)
    product_share(inputs, mixed.shape[1], wo, wo_mark, width, ROWS_PER_CHUNK, attended, counters, 4)


@kernel(parallel=True)
def front(
    x, norm, norm_bias, ffn_norm, ffn_norm_bias, eps, parallel_block, wqkv, wqkv_mark, bqkv, wo, wo_mark, bo,
    cos, sin, keys, values, cache_rows, positions, window, width, inputs, h, qkv, mixed, attended, counters, helpers,
):  # fmt: skip
    norm_rows(x, norm, norm_bias, eps, h)
    prepare(h, wqkv_mark, width, inputs)
    clear(counters)
    for _ in prange(helpers):
        _share(
            x.shape[1], wqkv, wqkv_mark, bqkv, wo, wo_mark, cos, sin, keys, values, cache_rows, positions, window,
            width, inputs, qkv, mixed, attended, counters, helpers,
        )  # fmt: skip
    merge(x, attended, bo, ffn_norm, ffn_norm_bias, eps, parallel_block, h)
