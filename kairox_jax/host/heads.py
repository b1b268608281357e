"""Attention of one position's query heads over the cache of their key head: scores, softmax, mixture.

Inner loops are LLVM vector IR, as in ``host.rows``. The heads that share keys take them by blocks of positions, so
that the cache is read from memory once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from kairox_jax.host.compile import kernel
from kairox_jax.host.decode import FLAGS, FLOAT, I64, LANES, VF, load, splat, store
from kairox_jax.host.exponential import exp
from kairox_jax.host.walk import reduce_all

intrinsic: Any = extending.intrinsic  # its callers do not pass the typing context
BLOCK_POSITIONS = 32  # their keys or values stay in the first cache while every head of the group reads them
_TOGETHER = 8  # positions whose dot products share the reading of the query and the horizontal sums
_TILE = 4  # vectors of the mixture that stay in registers
_ZERO = ir.Constant(VF, [0.0] * LANES)


def _i64(value: int) -> Any:
    return ir.Constant(I64, value)


def _add_product(b: Any, total: Any, one: Any, other: Any) -> None:
    """Add a product to what the stack slot ``total`` holds."""
    b.store(b.fadd(b.fmul(one, other, flags=FLAGS), b.load(total), flags=FLAGS), total)


@intrinsic
def _scores(typing_context, query, keys, count, size, out):  # type: ignore[no-untyped-def]
    """Write the dot products of a query with ``count`` keys of ``size`` floats, a multiple of 16."""

    def codegen(context, b, signature, args):
        query, keys, count, size, out = args
        stride = b.shl(size, _i64(2))

        def some(first: Any, many: int) -> None:
            totals = [cgutils.alloca_once(b, VF) for _ in range(many)]
            for total in totals:
                b.store(_ZERO, total)
            row = b.add(keys, b.mul(first, stride))
            rows = [b.add(row, b.mul(stride, _i64(i))) for i in range(many)]
            with cgutils.for_range(b, b.lshr(size, _i64(4))) as loop:
                at = b.shl(loop.index, _i64(6))
                part = load(b, b.add(query, at), 0, VF)
                for total, row in zip(totals, rows, strict=True):
                    _add_product(b, total, load(b, b.add(row, at), 0, VF), part)
            place = b.add(out, b.shl(first, _i64(2)))
            for i, score in enumerate(reduce_all(b, [b.load(total) for total in totals])):
                store(b, score, place, 4 * i)

        whole = b.and_(count, _i64(-_TOGETHER))
        with cgutils.for_range(b, b.udiv(count, _i64(_TOGETHER))) as loop:
            some(b.mul(loop.index, _i64(_TOGETHER)), _TOGETHER)
        with cgutils.for_range(b, b.sub(count, whole)) as loop:
            some(b.add(whole, loop.index), 1)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), codegen


@intrinsic
def _mix(typing_context, weights, values, count, size, out):  # type: ignore[no-untyped-def]
    """Add ``count`` weighted values of ``size`` floats, a multiple of 16, to ``out``."""

    def codegen(context, b, signature, args):
        weights, values, count, size, out = args
        stride = b.shl(size, _i64(2))

        def tile(at: Any, vectors: int) -> None:
            place, first = b.add(out, at), b.add(values, at)
            totals = [cgutils.alloca_once(b, VF) for _ in range(2 * vectors)]  # even and odd positions
            for i, total in enumerate(totals):
                b.store(load(b, place, 64 * i, VF) if i < vectors else _ZERO, total)

            def position(index: Any, mine: list[Any]) -> None:
                weight = splat(b, load(b, b.add(weights, b.shl(index, _i64(2))), 0, FLOAT))
                row = b.add(first, b.mul(index, stride))
                for i, total in enumerate(mine):
                    _add_product(b, total, load(b, row, 64 * i, VF), weight)

            with cgutils.for_range(b, b.lshr(count, _i64(1))) as loop:
                even = b.shl(loop.index, _i64(1))
                position(even, totals[:vectors])
                position(b.add(even, _i64(1)), totals[vectors:])
            with cgutils.for_range(b, b.and_(count, _i64(1))):
                position(b.sub(count, _i64(1)), totals[:vectors])
            for i in range(vectors):
                store(b, b.fadd(b.load(totals[i]), b.load(totals[vectors + i]), flags=FLAGS), place, 64 * i)

        tile_floats = _TILE * LANES
        tiles = b.udiv(size, _i64(tile_floats))
        with cgutils.for_range(b, tiles) as loop:
            tile(b.mul(loop.index, _i64(4 * tile_floats)), _TILE)
        begun = b.mul(tiles, _i64(tile_floats))
        with cgutils.for_range(b, b.lshr(b.sub(size, begun), _i64(4))) as loop:
            tile(b.add(b.shl(begun, _i64(2)), b.shl(loop.index, _i64(6))), 1)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), codegen


@kernel(inner=True)
def _softmax(scores, scale):
    """Replace scaled scores by their exp over the largest one's; return the sum."""
    best = np.float32(-np.inf)
    for s in range(scores.shape[0]):
        best = max(best, scores[s])
    total = np.float32(0)
    for s in range(scores.shape[0]):
        weight = exp((scores[s] - best) * scale)
        scores[s] = weight
        total += weight
    return total


@kernel(inner=True)
def _ragged_scores(query, keys, out):
    for s in range(keys.shape[0]):
        total = np.float32(0)
        for h in range(keys.shape[1]):
            total += query[h] * keys[s, h]
        out[s] = total


@kernel(inner=True)
def _ragged_mix(weights, values, out):
    for s in range(values.shape[0]):
        for h in range(values.shape[1]):
            out[h] += weights[s] * values[s, h]


@kernel()
def attend(queries, keys, values, scores, out):
    """Mix the values of one key head for each of its query heads.

    Args:
        queries: float32 [G H], G heads of H.
        keys, values: float32 [S, H] with rows that follow each other.
        scores: scratch, float32 [G, at least S].
        out: float32 [G H], overwritten.
    """
    length, size = keys.shape
    heads = queries.shape[0] // size
    fits = size % 16 == 0
    for first in range(0, length, BLOCK_POSITIONS):
        last = min(first + BLOCK_POSITIONS, length)
        for g in range(heads):
            query = queries[g * size : (g + 1) * size]
            if fits:
                _scores(
                    query.ctypes.data,
                    keys[first].ctypes.data,
                    last - first,
                    size,
                    scores[g, first:].ctypes.data,
                )
            else:
                _ragged_scores(query, keys[first:last], scores[g, first:last])
    out[:] = 0
    scale = np.float32(1) / np.float32(math.sqrt(size))
    for g in range(heads):
        total = _softmax(scores[g, :length], scale)
        for s in range(length):
            scores[g, s] /= total
    for first in range(0, length, BLOCK_POSITIONS):
        last = min(first + BLOCK_POSITIONS, length)
        for g in range(heads):
            mixed = out[g * size : (g + 1) * size]
            if fits:
                _mix(
                    scores[g, first:].ctypes.data,
                    values[first].ctypes.data,
                    last - first,
                    size,
                    mixed.ctypes.data,
                )
            else:
                _ragged_mix(scores[g, first:last], values[first:last], mixed)
