"""The walk over a packed row, block by block, and horizontal sums: what the inner loops in LLVM IR share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kairox_jax.host.decode import FLAGS, I32, I64, INT8, LAYOUTS, prefetch

# How far ahead of a loop memory is asked for, into the second cache. Random Q8_0 records on a busy machine, as a
# share of a streaming read with the same thread: 512 B to 3 KB into the first cache 45-48 %, 2 KB into the second
# 50 %, 4 KB 52 %.
AHEAD_BYTES = 2048
UNROLL = 4  # blocks of 32 weights


def walk(
    b: Any,
    code: int,
    row: Any,
    beside: Any,
    num: Any,
    block: Callable[[int, Any, Any], None],
    one: Callable[[Callable, Any, Any], None],
    *,
    stride: int,
    following: Any | None = None,
) -> None:
    """Emit the loop over a row of ``num`` weights.

    Args:
        b: builder.
        code: the row's format; the integer forms walk like their rows.
        row, beside: addresses of the row, and of what is walked over with it, ``stride`` bytes for a block.
        num: weights.
        block: emits the work for 32 weights: ``(index, address, address beside)``. Blocks are taken ``UNROLL`` at a
            time, and ``index`` counts these.
        one: the same for a single weight, where rows may be ragged: ``(decoder, address, address beside)``.
        stride: bytes.
        following: the address of what is read next; the end of a row asks for its beginning.
    """
    block_bytes, _, single = LAYOUTS[code % INT8]
    blocks = b.lshr(num, ir.Constant(I64, 5))
    row_bytes = b.mul(blocks, ir.Constant(I64, block_bytes))
    ahead = ir.Constant(I64, AHEAD_BYTES)
    ahead = b.select(b.icmp_unsigned("<", row_bytes, ahead), row_bytes, ahead)

    def some_blocks(first: Any, count: int) -> None:
        offset = b.mul(first, ir.Constant(I64, block_bytes))
        there = b.add(offset, ahead)
        if following is None:
            asked = b.add(row, there)
        else:
            beyond = b.add(following, b.sub(there, row_bytes))
            asked = b.select(b.icmp_unsigned("<", there, row_bytes), b.add(row, there), beyond)
        for line in range(0, count * block_bytes, 64):
            prefetch(b, asked, line)
        at, place = b.add(row, offset), b.add(beside, b.mul(first, ir.Constant(I64, stride)))
        for index in range(count):
            block(
                index,
                b.add(at, ir.Constant(I64, index * block_bytes)),
                b.add(place, ir.Constant(I64, index * stride)),
            )

    many = b.udiv(blocks, ir.Constant(I64, UNROLL))
    with cgutils.for_range(b, many) as loop:
        some_blocks(b.mul(loop.index, ir.Constant(I64, UNROLL)), UNROLL)
    begun = b.mul(many, ir.Constant(I64, UNROLL))
    with cgutils.for_range(b, b.sub(blocks, begun)) as loop:
        some_blocks(b.add(begun, loop.index), 1)
    if single is None:
        return
    at, place = b.add(row, row_bytes), b.add(beside, b.mul(blocks, ir.Constant(I64, stride)))
    with cgutils.for_range(b, b.sub(num, b.shl(blocks, ir.Constant(I64, 5)))) as loop:
        one(
            single[1],
            b.add(at, b.mul(loop.index, ir.Constant(I64, single[0]))),
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
