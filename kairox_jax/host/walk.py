"""The walk over a packed row, block by block, and horizontal sums: what the inner loops in LLVM IR share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kairox_jax.host.decode import FLAGS, I32, I64, INT8, LAYOUTS, prefetch

# Blocks of a lone row that a round of the loop takes; of several rows, so many as a cache line holds.
UNROLL = 4
_LINE_BYTES = 64


def walk(
    b: Any,
    code: int,
    rows: list[Any],
    beside: Any,
    num: Any,
    block: Callable[[int, list[Any], Any], None],
    one: Callable[[Callable, list[Any], Any], None],
    *,
    stride: int,
    asked: list[Any] | None = None,
) -> None:
    """Emit the loop over rows of ``num`` weights, read side by side.

    Args:
        b: builder.
        code: the rows' format; the integer forms walk like their rows.
        rows, beside: addresses of the rows, and of what is walked over with them, ``stride`` bytes for a block.
        num: weights.
        block: emits the work for 32 weights of each row: ``(index, addresses, address beside)``. Blocks are taken
            some at a time, and ``index`` counts these.
        one: the same for single weights, where rows may be ragged: ``(decoder, addresses, address beside)``.
        stride: bytes.
        asked: addresses of the rows that will be read next. As this loop goes over its rows it asks memory for the
            same places in those: asked for in one go, they would fill the core's queue and stop the sums.
    """
    block_bytes, _, single = LAYOUTS[code % INT8]
    at_once = UNROLL if len(rows) == 1 else max(1, _LINE_BYTES // block_bytes)
    blocks = b.lshr(num, ir.Constant(I64, 5))

    def some_blocks(first: Any, count: int) -> None:
        offset, size = b.mul(first, ir.Constant(I64, block_bytes)), count * block_bytes
        lines = max(1, round(size / _LINE_BYTES))
        for row in asked or []:
            for line in range(lines):
                prefetch(b, b.add(row, offset), line * size // lines)
        ats = [b.add(row, offset) for row in rows]
        place = b.add(beside, b.mul(first, ir.Constant(I64, stride)))
        for index in range(count):
            here = ir.Constant(I64, index * block_bytes)
            block(index, [b.add(at, here) for at in ats], b.add(place, ir.Constant(I64, index * stride)))

    many = b.udiv(blocks, ir.Constant(I64, at_once))
    with cgutils.for_range(b, many) as loop:
        some_blocks(b.mul(loop.index, ir.Constant(I64, at_once)), at_once)
    if at_once > 1:
        begun = b.mul(many, ir.Constant(I64, at_once))
        with cgutils.for_range(b, b.sub(blocks, begun)) as loop:
            some_blocks(b.add(begun, loop.index), 1)
    if single is None:
        return
    row_bytes = b.mul(blocks, ir.Constant(I64, block_bytes))
    place = b.add(beside, b.mul(blocks, ir.Constant(I64, stride)))
    with cgutils.for_range(b, b.sub(num, b.shl(blocks, ir.Constant(I64, 5)))) as loop:
        offset = b.add(row_bytes, b.mul(loop.index, ir.Constant(I64, single[0])))
        one(
            single[1],
            [b.add(row, offset) for row in rows],
            b.add(place, b.shl(loop.index, ir.Constant(I64, 2))),
        )


def _shuffled(b: Any, one: Any, other: Any, lanes: list[int]) -> Any:
    return b.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def reduce_all(b: Any, vectors: list[Any]) -> list[Any]:
    """Return the sum of each vector's lanes; several vectors (a power of two) share their shuffles."""
    lanes, owners = vectors[0].type.count, 1  # each vector holds sums of so many owners, in runs of lanes
    while len(vectors) > 1:
        run = lanes // owners
        low = [i for i in range(2 * lanes) if i % run < run // 2]
        high = [i for i in range(2 * lanes) if i % run >= run // 2]
        vectors = [
            b.fadd(_shuffled(b, *pair, low), _shuffled(b, *pair, high), flags=FLAGS)
            for pair in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        owners *= 2
    (whole,) = vectors
    while lanes > owners:
        run = lanes // owners
        low = [i for i in range(lanes) if i % run < run // 2]
        high = [i for i in range(lanes) if i % run >= run // 2]
        whole = b.fadd(_shuffled(b, whole, whole, low), _shuffled(b, whole, whole, high), flags=FLAGS)
        lanes //= 2
    return [b.extract_element(whole, ir.Constant(I32, owner)) for owner in range(owners)]
