"""Products of a few unpacked rows with some tokens, whose sums stay in registers, as LLVM vector IR."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from kairox_jax.host.decode import FLAGS, FLOAT, I64, LANES, VF, load, splat, store

intrinsic: Any = extending.intrinsic  # its callers do not pass the typing context
# Sixteen sums of 16 floats hide the latency of additions, and eight weights and two vectors of tokens are read for
# sixteen products: a core with 512-bit vectors then multiplies at nine tenths of its speed.
ROWS, TOKENS = 8, 32
PARTS = TOKENS // LANES
UNROLL = 4  # inputs that a round of the loop takes
# How the weights lie, told by a tuple's length: a row's one after the other, or those of all rows for one input.
ROW_BY_ROW, INPUT_BY_INPUT = (0,), (0,) * 2


@intrinsic
def add_products(typing_context, order, weights, stride, tokens, count, num, out):  # type: ignore[no-untyped-def]
    """Add the products of ROWS rows of ``num`` float32 weights with TOKENS tokens to floats [ROWS, TOKENS] at ``out``.

    ``stride``: bytes between two rows, or between the weights for two inputs. ``tokens``: floats [num, TOKENS].
    Vectors of them that lie beyond the first ``count`` are left out: half of the work for half a group.
    """

    def codegen(context, b, signature, args):
        _, weights, stride, tokens, count, num, out = args
        few = b.icmp_signed("<=", count, ir.Constant(I64, LANES))
        with b.if_else(few) as (then, otherwise):
            for branch, parts in ((then, 1), (otherwise, PARTS)):
                with branch:
                    _add_products(b, order.count == len(ROW_BY_ROW), parts, weights, stride, tokens, num, out)
        return context.get_dummy_value()

    return types.void(order, *(types.int64,) * 6), codegen


def _add_products(
    b: Any, by_row: bool, parts: int, weights: Any, stride: Any, tokens: Any, num: Any, out: Any
) -> None:
    """Emit the products with the first ``parts`` vectors of tokens."""
    places = [(row, part) for row in range(ROWS) for part in range(parts)]
    sums = {}
    for row, part in places:
        at = 4 * (TOKENS * row + LANES * part)
        sums[row, part] = cgutils.alloca_once(b, VF)
        b.store(load(b, out, at, VF), sums[row, part])
    begins = [b.add(weights, b.mul(stride, ir.Constant(I64, row))) for row in range(ROWS if by_row else 1)]
    step = ir.Constant(I64, 4) if by_row else stride

    def inputs(first: Any, count: int) -> None:
        place = b.add(tokens, b.mul(first, ir.Constant(I64, 4 * TOKENS)))
        ats = [b.add(begin, b.mul(first, step)) for begin in begins]
        for index in range(count):
            vectors = [load(b, place, 4 * (TOKENS * index + LANES * part), VF) for part in range(parts)]
            for row in range(ROWS):
                weight = load(b, ats[row], 4 * index, FLOAT) if by_row else load(b, ats[0], 4 * row, FLOAT)
                wide = splat(b, weight)
                for part, vector in enumerate(vectors):
                    into = sums[row, part]
                    b.store(b.fadd(b.load(into), b.fmul(wide, vector, flags=FLAGS), flags=FLAGS), into)
            if not by_row:
                ats = [b.add(ats[0], stride)]

    many = b.udiv(num, ir.Constant(I64, UNROLL))
    with cgutils.for_range(b, many) as loop:
        inputs(b.mul(loop.index, ir.Constant(I64, UNROLL)), UNROLL)
    begun = b.mul(many, ir.Constant(I64, UNROLL))
    with cgutils.for_range(b, b.sub(num, begun)) as loop:
        inputs(b.add(begun, loop.index), 1)
    for row, part in places:
        store(b, b.load(sums[row, part]), out, 4 * (TOKENS * row + LANES * part))
