"""The walk over a packed row, block by block, and horizontal sums: what the inner loops in LLVM IR share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kairox_jax.host.decode import FLAGS, I32, I64, INT8, LAYOUTS, prefetch

# How far ahead of a loop memory is asked for, into the second cache.
AHEAD_BYTES = 1024
# Blocks of 32 weights; one where several rows are read at a time, which is as fast and compiles faster.
UNROLL = 4


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
    jump: Any | None = None,
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
        jump: bytes from a row to what is read after it, whose beginning its end asks for; 0 and None: nothing.
    """
    block_bytes, _, single = LAYOUTS[code % INT8]
    unroll = UNROLL if len(rows) == 1 else 1
    blocks = b.lshr(num, ir.Constant(I64, 5))
    row_bytes, ahead = b.mul(blocks, ir.Constant(I64, block_bytes)), ir.Constant(I64, AHEAD_BYTES)

    def some_blocks(first: Any, count: int, asked: Any | None) -> None:
        offset = b.mul(first, ir.Constant(I64, block_bytes))
        ats, place = (
            [b.add(row, offset) for row in rows],
            b.add(beside, b.mul(first, ir.Constant(I64, stride))),
        )
        if asked is not None:
            size = count * block_bytes
            # Of several rows long ones are read, whose lines the processor itself completes.
            lines = -(-size // 64) if len(rows) == 1 else max(1, round(size / 64))
            for at in ats:
                for line in range(lines):
                    prefetch(b, b.add(at, asked), line * size // lines)
        for index in range(count):
            here = ir.Constant(I64, index * block_bytes)
            block(index, [b.add(at, here) for at in ats], b.add(place, ir.Constant(I64, index * stride)))

    many, step = b.udiv(blocks, ir.Constant(I64, unroll)), ir.Constant(I64, unroll * block_bytes)
    inner = b.select(
        b.icmp_unsigned(">", row_bytes, ahead), b.udiv(b.sub(row_bytes, ahead), step), ir.Constant(I64, 0)
    )
    beyond = ir.Constant(I64, 0)
    if jump is not None:
        beyond = b.select(b.icmp_unsigned("==", jump, beyond), beyond, b.sub(jump, b.mul(inner, step)))
    # Two parts of one loop: the second, near the rows' end, asks for what lies behind, or again for what it reads.
    with cgutils.for_range(b, ir.Constant(I64, 2)) as part:
        is_first = b.icmp_unsigned("==", part.index, ir.Constant(I64, 0))
        begin = b.select(is_first, ir.Constant(I64, 0), inner)
        asked, end = b.select(is_first, ahead, beyond), b.select(is_first, inner, many)
        with cgutils.for_range(b, b.sub(end, begin)) as loop:
            some_blocks(b.mul(b.add(begin, loop.index), ir.Constant(I64, unroll)), unroll, asked)
    if unroll > 1:
        begun = b.mul(many, ir.Constant(I64, unroll))
        with cgutils.for_range(b, b.sub(blocks, begun)) as loop:
            some_blocks(b.add(begun, loop.index), 1, beyond)
    if single is None:
        return
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
