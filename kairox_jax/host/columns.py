"""Inner loops over the shared-scale columns of one block of neurons, as LLVM vector IR.

out[d] += scale[d] * sum_k z_k (code_k[d] - zero) + minimum[d] * sum_k z_k, for the active neurons k of the block: the
codes are summed first and scaled once. See ``quant.columns`` for the bytes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from kairox_jax.host.decode import (
    BLOCK,
    FIRST_COLUMN,
    FLAGS,
    FLOAT,
    I64,
    LANES,
    Q4_0_COLUMN,
    Q4_1_COLUMN,
    Q8_0_COLUMN,
    V16,
    VF,
    Target,
    half_to_float,
    levels_4,
    levels_8,
    load,
    prefetch,
    splat,
    store,
    target_of,
)

intrinsic: Any = extending.intrinsic  # its callers do not pass the typing context
GROUPS = {1: 4, 4: 2, 8: 1}  # groups of 32 columns whose sums are kept in registers, for a number of tokens
AHEAD_BYTES = 512  # in each column: several are read at a time
MAX_NEURONS = 32  # of a block


def _levels(b: Any, code: int, address: Any, offset: int, target: Target) -> list[Any]:
    """Load 32 codes as two vectors of float32, their zero taken off."""
    if code == Q8_0_COLUMN:
        return levels_8(b, address, offset)
    return levels_4(b, address, offset, 8 if code == Q4_0_COLUMN else 0, target)


@intrinsic
def add_columns(typing_context, mark, width, columns, factors, count, scales, minima, out, out_bytes, groups):  # type: ignore[no-untyped-def]
    """Add ``count`` columns to ``groups`` times 32 floats at ``out``, for each of ``width`` tokens.

    ``columns`` lists addresses, ``factors`` [count, width] floats; a token's sums begin ``out_bytes`` apart.
    """
    code, tokens = mark.count, width.count
    group_bytes, most = 32 if code == Q8_0_COLUMN else 16, GROUPS[width.count]

    def codegen(context, b, signature, args):
        if code < FIRST_COLUMN:
            return context.get_dummy_value()  # rows are never listed, but the branch that would is compiled
        _, _, columns, factors, count, scales, minima, out, out_bytes, groups = args
        target = target_of(context)
        zero = ir.Constant(VF, [0.0] * LANES)
        sums = [[cgutils.alloca_once_value(b, zero) for _ in range(2 * most)] for _ in range(tokens)]
        totals = [cgutils.alloca_once_value(b, zero) for _ in range(tokens)]

        def add(into, value):
            b.store(b.fadd(b.load(into), value, flags=FLAGS), into)

        if code == Q4_1_COLUMN:  # once for all groups
            with cgutils.for_range(b, count) as loop:
                place = b.add(factors, b.mul(loop.index, ir.Constant(I64, 4 * tokens)))
                for token in range(tokens):
                    add(totals[token], splat(b, load(b, place, 4 * token, FLOAT)))

        def some_groups(first: Any, size: int) -> None:
            for part in (part for token in range(tokens) for part in sums[token][: 2 * size]):
                b.store(zero, part)
            offset = b.mul(first, ir.Constant(I64, group_bytes))
            with cgutils.for_range(b, count) as loop:
                column = load(b, b.add(columns, b.shl(loop.index, ir.Constant(I64, 3))), 0, I64)
                place = b.add(factors, b.mul(loop.index, ir.Constant(I64, 4 * tokens)))
                zs = [splat(b, load(b, place, 4 * token, FLOAT)) for token in range(tokens)]
                address = b.add(column, offset)
                for line in range(0, size * group_bytes, 64):
                    prefetch(b, address, AHEAD_BYTES + line)
                for group in range(size):
                    for half, level in enumerate(_levels(b, code, address, group * group_bytes, target)):
                        for token in range(tokens):
                            add(sums[token][2 * group + half], b.fmul(level, zs[token], flags=FLAGS))
            halves = b.shl(first, ir.Constant(I64, 6))  # bytes of 32 float16
            for part in range(2 * size):
                scale = half_to_float(b, load(b, b.add(scales, halves), 2 * LANES * part, V16), target)
                least = None
                if code == Q4_1_COLUMN:
                    least = half_to_float(b, load(b, b.add(minima, halves), 2 * LANES * part, V16), target)
                for token in range(tokens):
                    place = b.add(out, b.mul(out_bytes, ir.Constant(I64, token)))
                    place = b.add(place, b.shl(first, ir.Constant(I64, 7)))
                    value = b.fadd(
                        load(b, place, 4 * LANES * part, VF),
                        b.fmul(b.load(sums[token][part]), scale, flags=FLAGS),
                        flags=FLAGS,
                    )
                    if least is not None:
                        value = b.fadd(value, b.fmul(b.load(totals[token]), least, flags=FLAGS), flags=FLAGS)
                    store(b, value, place, 4 * LANES * part)

        many = b.udiv(groups, ir.Constant(I64, most))
        with cgutils.for_range(b, many) as loop:
            some_groups(b.mul(loop.index, ir.Constant(I64, most)), most)
        begun = b.mul(many, ir.Constant(I64, most))
        with cgutils.for_range(b, b.sub(groups, begun)) as loop:
            some_groups(b.add(begun, loop.index), 1)
        return context.get_dummy_value()

    return types.void(mark, width, *(types.int64,) * 8), codegen


@intrinsic
def unpack_column(typing_context, mark, column, scales, minima, out, num):  # type: ignore[no-untyped-def]
    """Write a column's ``num`` weights to ``out``; ``scales`` and ``minima`` are those of its block of neurons."""
    code = mark.count
    group_bytes = 32 if code == Q8_0_COLUMN else 16

    def codegen(context, b, signature, args):
        if code < FIRST_COLUMN:
            return context.get_dummy_value()
        _, column, scales, minima, out, num = args
        target, last = target_of(context), cgutils.alloca_once(b, ir.ArrayType(FLOAT, BLOCK))

        def group(index: Any, place: Any) -> None:
            halves = b.shl(index, ir.Constant(I64, 6))  # bytes of 32 float16
            codes = b.add(column, b.mul(index, ir.Constant(I64, group_bytes)))
            for part, level in enumerate(_levels(b, code, codes, 0, target)):
                scale = half_to_float(b, load(b, b.add(scales, halves), 2 * LANES * part, V16), target)
                weights = b.fmul(level, scale, flags=FLAGS)
                if code == Q4_1_COLUMN:
                    least = half_to_float(b, load(b, b.add(minima, halves), 2 * LANES * part, V16), target)
                    weights = b.fadd(weights, least, flags=FLAGS)
                store(b, weights, place, 4 * LANES * part)

        whole = b.lshr(num, ir.Constant(I64, 5))
        with cgutils.for_range(b, whole) as loop:
            group(loop.index, b.add(out, b.shl(loop.index, ir.Constant(I64, 7))))
        begun = b.shl(whole, ir.Constant(I64, 5))
        with b.if_then(b.icmp_unsigned("<", begun, num)):
            rest = b.ptrtoint(last, I64)
            group(whole, rest)
            with cgutils.for_range(b, b.sub(num, begun)) as loop:
                at = b.shl(loop.index, ir.Constant(I64, 2))
                place = b.add(out, b.shl(begun, ir.Constant(I64, 2)))
                store(b, load(b, b.add(rest, at), 0, FLOAT), b.add(place, at), 0)
        return context.get_dummy_value()

    return types.void(mark, *(types.int64,) * 5), codegen
