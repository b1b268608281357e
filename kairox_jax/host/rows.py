"""Inner loops over one packed row, as LLVM vector IR: dot product, scaled addition, unpacking.

A row is decoded to the weights of ``quant.dequantize``; blocks are scaled after their sum where that is faster. The
formulas are in docs/kernels.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from kairox_jax.host.decode import (
    CODES,
    COLUMN_CODES,
    FIRST_COLUMN,
    FLAGS,
    FLOAT,
    I64,
    LANES,
    LAYOUTS,
    VF,
    load,
    prefetch,
    splat,
    store,
    target_of,
)

intrinsic: Any = extending.intrinsic  # its callers do not pass the typing context
# How far ahead of a loop memory is asked for, into the second cache. Random Q8_0 records on a busy machine, as a
# share of a streaming read with the same thread: 512 B to 3 KB into the first cache 45-48 %, 2 KB into the second
# 50 %, 4 KB 52 %.
AHEAD_BYTES = 2048
UNROLL = 4  # blocks of 32 weights
# Compiled code is told a format by the type of an argument, a tuple as long as the format's code: each format is
# compiled by itself, when it is first used. One kernel for all of them took 12 s to compile.
MARKS = {name: (0,) * code for name, code in (CODES | COLUMN_CODES).items()}
MARK_F32 = MARKS["f32"]


def host_formats() -> tuple[str, ...]:
    """Return the formats that the host kernels read."""
    return tuple(CODES)


def _over_row(
    context: Any,
    b: Any,
    code: int,
    row: Any,
    floats: Any,
    num: Any,
    step: Callable[[int | None, list[Any], Any | None, Any], None],
    following: Any | None = None,
) -> None:
    """Emit the loop over a row: ``step(index, halves, scale, address)`` for 32 weights; index None for one.

    Blocks are taken ``UNROLL`` at a time, and ``index`` counts these: independent sums hide the latency of additions.
    ``scale`` is what the halves must still be multiplied with, or None. ``following`` is the address of what is
    read next: the end of a row asks for its beginning.
    """
    if code >= FIRST_COLUMN:
        return  # such columns are never read as rows, but the branch that would is compiled
    block_bytes, decode, single = LAYOUTS[code]
    target = target_of(context)
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
        block = b.add(row, offset)
        place = b.add(floats, b.shl(first, ir.Constant(I64, 7)))
        for index in range(count):
            at = b.add(block, ir.Constant(I64, index * block_bytes))
            halves, scale = decode(b, at, target)
            step(index, halves, scale, b.add(place, ir.Constant(I64, 8 * LANES * index)))

    many = b.udiv(blocks, ir.Constant(I64, UNROLL))
    with cgutils.for_range(b, many) as loop:
        some_blocks(b.mul(loop.index, ir.Constant(I64, UNROLL)), UNROLL)
    begun = b.mul(many, ir.Constant(I64, UNROLL))
    with cgutils.for_range(b, b.sub(blocks, begun)) as loop:
        some_blocks(b.add(begun, loop.index), 1)
    if single is None:
        return
    elem_bytes, decode_one = single
    done = b.shl(blocks, ir.Constant(I64, 5))
    with cgutils.for_range(b, b.sub(num, done)) as loop:
        index = b.add(done, loop.index)
        weight = decode_one(b, b.add(row, b.mul(index, ir.Constant(I64, elem_bytes))), target)
        step(None, [weight], None, b.add(floats, b.shl(index, ir.Constant(I64, 2))))


@intrinsic
def dot(typing_context, mark, row, x, num, following):  # type: ignore[no-untyped-def]
    """Multiply a row with ``num`` floats at ``x``."""

    def codegen(context, b, signature, args):
        _, row, x, num, following = args
        zero = ir.Constant(VF, [0.0] * LANES)
        sums = [cgutils.alloca_once_value(b, zero) for _ in range(2 * UNROLL)]
        tail = cgutils.alloca_once_value(b, ir.Constant(FLOAT, 0.0))

        def add(into, one, other):
            b.store(b.fadd(b.load(into), b.fmul(one, other, flags=FLAGS), flags=FLAGS), into)

        def step(index, halves, scale, place):
            inputs = [load(b, place, 4 * LANES * half, each.type) for half, each in enumerate(halves)]
            if index is None:
                add(tail, halves[0], inputs[0])
            elif scale is None:
                for half in (0, 1):
                    add(sums[2 * index + half], halves[half], inputs[half])
            else:  # a block is scaled once: three operations for 32 weights, not four
                products = [b.fmul(*pair, flags=FLAGS) for pair in zip(halves, inputs, strict=True)]
                add(sums[index], b.fadd(*products, flags=FLAGS), scale)

        _over_row(context, b, mark.count, row, x, num, step, following)
        parts = [b.load(part) for part in sums]
        while len(parts) > 1:
            parts = [
                b.fadd(one, other, flags=FLAGS) for one, other in zip(parts[::2], parts[1::2], strict=True)
            ]
        reduce = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(FLOAT, [FLOAT, VF]), "llvm.vector.reduce.fadd.v16f32"
        )
        return b.call(reduce, [b.load(tail), parts[0]], fastmath=FLAGS)

    return types.float32(mark, *(types.int64,) * 4), codegen


@intrinsic
def axpy(typing_context, mark, row, factor, out, num, following):  # type: ignore[no-untyped-def]
    """Add ``factor`` times a row to ``num`` floats at ``out``."""

    def codegen(context, b, signature, args):
        _, row, factor, out, num, following = args
        wide = splat(b, factor)

        def step(index, halves, scale, place):
            times = factor if index is None else wide if scale is None else b.fmul(wide, scale, flags=FLAGS)
            for half, weights in enumerate(halves):
                at = 4 * LANES * half
                product = b.fmul(weights, times, flags=FLAGS)
                store(b, b.fadd(load(b, place, at, weights.type), product, flags=FLAGS), place, at)

        _over_row(context, b, mark.count, row, out, num, step, following)
        return context.get_dummy_value()

    return types.void(mark, types.int64, types.float32, *(types.int64,) * 3), codegen


@intrinsic
def unpack(typing_context, mark, row, out, num):  # type: ignore[no-untyped-def]
    """Write a row's ``num`` weights to ``out``."""

    def codegen(context, b, signature, args):
        _, row, out, num = args

        def step(index, halves, scale, place):
            for half, weights in enumerate(halves):
                value = weights if scale is None else b.fmul(weights, scale, flags=FLAGS)
                store(b, value, place, 4 * LANES * half)

        _over_row(context, b, mark.count, row, out, num, step)
        return context.get_dummy_value()

    return types.void(mark, *(types.int64,) * 3), codegen
