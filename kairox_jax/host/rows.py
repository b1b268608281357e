"""Inner loops over one packed row, as LLVM vector IR: dot products, scaled addition, unpacking.

A row is decoded to the weights of ``quant.dequantize``; blocks are scaled after their sum where that is faster. The
formulas are in docs/kernels.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from kairox_jax.host import integers
from kairox_jax.host.decode import (
    BLOCK,
    CODES,
    COLUMN_CODES,
    FIRST_COLUMN,
    FLAGS,
    FLOAT,
    I64,
    INT8,
    INT8_CODES,
    LANES,
    LAYOUTS,
    VF,
    load,
    prefetch,
    splat,
    store,
    target_of,
)
from kairox_jax.host.walk import reduce_all, walk

intrinsic: Any = extending.intrinsic  # its callers do not pass the typing context
# Compiled code is told a format by the type of an argument, a tuple as long as the format's code: each format is
# compiled by itself, when it is first used. One kernel for all of them took 12 s to compile.
MARKS = {name: (0,) * code for name, code in (CODES | COLUMN_CODES).items()}
_INT8_MARKS = {name: (0,) * code for name, code in INT8_CODES.items()}
MARK_F32 = MARKS["f32"]
# Tokens that one pass over a row serves, told by a tuple's length as well: one, up to four, up to eight.
WIDTHS = (1, 4, 8)


def host_formats() -> tuple[str, ...]:
    """Return the formats that the host kernels read."""
    return tuple(CODES)


def mark_of(format: str, activations: str) -> tuple[int, ...]:
    """Return the mark of a row format; with "int8" activations that of its integer form, where it has one."""
    return _INT8_MARKS.get(format, MARKS[format]) if activations == "int8" else MARKS[format]


def width_of(batch: int) -> tuple[int, ...]:
    """Return the mark of the least width that holds a batch."""
    return (0,) * next(width for width in WIDTHS if batch <= width)


def prepared_floats(num: int, width: int) -> int:
    """Return the floats of scratch that ``prepare`` fills for rows of ``num`` weights."""
    return -(-num // BLOCK) * BLOCK * width


@intrinsic
def prepare(typing_context, mark, width, x, batch, num, out):  # type: ignore[no-untyped-def]
    """Write the tokens at ``x``, float32 [batch, num], as ``dots`` of this mark reads them.

    Float forms: blocks of [width, 32] floats. Tokens from ``batch`` on must be zero there before.
    """

    def codegen(context, b, signature, args):
        _, _, x, batch, num, out = args
        blocks = b.lshr(num, ir.Constant(I64, 5))
        with cgutils.for_range(b, batch) as token:
            source = b.add(x, b.shl(b.mul(token.index, num), ir.Constant(I64, 2)))
            if mark.count >= INT8:
                integers.round_token(context, b, mark.count, width.count, source, token.index, blocks, out)
            else:
                _copy_token(b, width.count, source, token.index, num, out)
        return context.get_dummy_value()

    return types.void(mark, width, *(types.int64,) * 4), codegen


def _copy_token(b: Any, width: int, source: Any, token: Any, num: Any, out: Any) -> None:
    stride, blocks = ir.Constant(I64, 4 * BLOCK * width), b.lshr(num, ir.Constant(I64, 5))
    target = b.add(out, b.shl(token, ir.Constant(I64, 7)))
    with cgutils.for_range(b, blocks) as loop:
        at = b.add(source, b.shl(loop.index, ir.Constant(I64, 7)))
        place = b.add(target, b.mul(loop.index, stride))
        for half in (0, 4 * LANES):
            store(b, load(b, at, half, VF), place, half)
    done = b.shl(blocks, ir.Constant(I64, 5))
    with cgutils.for_range(b, b.sub(num, done)) as loop:
        at = b.add(source, b.shl(b.add(done, loop.index), ir.Constant(I64, 2)))
        place = b.add(target, b.add(b.mul(blocks, stride), b.shl(loop.index, ir.Constant(I64, 2))))
        store(b, load(b, at, 0, FLOAT), place, 0)


@intrinsic
def dots(typing_context, mark, width, row, x, num, following, out):  # type: ignore[no-untyped-def]
    """Multiply a row with each of ``width`` prepared tokens; writes as many floats to ``out``."""

    def codegen(context, b, signature, args):
        _, _, row, x, num, following, out = args
        code = mark.count
        if code >= INT8:
            integers.dots(context, b, code, width.count, row, x, num, following, out)
        elif (
            code < FIRST_COLUMN
        ):  # such columns are never read as rows, but the branch that would is compiled
            _float_dots(context, b, code, width.count, row, x, num, following, out)
        return context.get_dummy_value()

    return types.void(mark, width, *(types.int64,) * 5), codegen


def _float_dots(
    context: Any, b: Any, code: int, width: int, row: Any, x: Any, num: Any, following: Any, out: Any
) -> None:
    _, decode, _ = LAYOUTS[code]
    target = target_of(context)
    zero = ir.Constant(VF, [0.0] * LANES)
    # Independent sums hide the latency of additions.
    copies = max(1, 8 // width)
    sums = [[cgutils.alloca_once_value(b, zero) for _ in range(copies)] for _ in range(width)]
    tails = [cgutils.alloca_once_value(b, ir.Constant(FLOAT, 0.0)) for _ in range(width)]

    def add(into: Any, one: Any, other: Any) -> None:
        b.store(b.fadd(b.load(into), b.fmul(one, other, flags=FLAGS), flags=FLAGS), into)

    def block(index: int, at: Any, place: Any) -> None:
        halves, scale = decode(b, at, target)
        if scale is not None and width > 1:
            halves, scale = [b.fmul(half, scale, flags=FLAGS) for half in halves], None
        for token in range(width):
            inputs = [load(b, place, 4 * (BLOCK * token + LANES * half), VF) for half in (0, 1)]
            mine = sums[token]
            if scale is None:
                for half in (0, 1):
                    add(mine[(2 * index + half) % copies], halves[half], inputs[half])
            else:  # a block is scaled once: three operations for 32 weights, not four
                products = [b.fmul(*pair, flags=FLAGS) for pair in zip(halves, inputs, strict=True)]
                add(mine[index % copies], b.fadd(*products, flags=FLAGS), scale)

    def one(decode_one: Callable, at: Any, place: Any) -> None:
        weight = decode_one(b, at, target)
        for token in range(width):
            add(tails[token], weight, load(b, place, 4 * BLOCK * token, FLOAT))

    walk(b, code, row, x, num, block, one, stride=4 * BLOCK * width, following=following)
    wholes = [_pairwise(b, [b.load(part) for part in mine]) for mine in sums]
    for token, whole in enumerate(reduce_all(b, wholes)):
        store(b, b.fadd(whole, b.load(tails[token]), flags=FLAGS), out, 4 * token)


def _pairwise(b: Any, parts: list[Any]) -> Any:
    while len(parts) > 1:
        parts = [b.fadd(*pair, flags=FLAGS) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _plain_walk(
    context: Any,
    b: Any,
    code: int,
    row: Any,
    floats: Any,
    num: Any,
    step: Callable,
    following: Any | None = None,
) -> None:
    """Walk over a row beside one vector of floats: ``step(weights, scale or None, address of the floats)``."""
    if code >= FIRST_COLUMN:
        return
    _, decode, _ = LAYOUTS[code]
    target = target_of(context)

    def block(index: int, at: Any, place: Any) -> None:
        halves, scale = decode(b, at, target)
        for half, weights in enumerate(halves):
            step(weights, scale, b.add(place, ir.Constant(I64, 4 * LANES * half)))

    def one(decode_one: Callable, at: Any, place: Any) -> None:
        step(decode_one(b, at, target), None, place)

    walk(b, code, row, floats, num, block, one, stride=4 * BLOCK, following=following)


@intrinsic
def ask(typing_context, address, size):  # type: ignore[no-untyped-def]
    """Ask for ``size`` bytes of memory to be read."""

    def codegen(context, b, signature, args):
        lines = b.lshr(b.add(args[1], ir.Constant(I64, 63)), ir.Constant(I64, 6))
        with cgutils.for_range(b, lines) as loop:
            prefetch(b, b.add(args[0], b.shl(loop.index, ir.Constant(I64, 6))), 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def axpy(typing_context, mark, row, factor, out, num, following):  # type: ignore[no-untyped-def]
    """Add ``factor`` times a row to ``num`` floats at ``out``."""

    def codegen(context, b, signature, args):
        _, row, factor, out, num, following = args
        wide = splat(b, factor)

        def step(weights, scale, place):
            times = factor if weights.type == FLOAT else wide
            times = times if scale is None else b.fmul(times, scale, flags=FLAGS)
            product = b.fmul(weights, times, flags=FLAGS)
            store(b, b.fadd(load(b, place, 0, weights.type), product, flags=FLAGS), place, 0)

        _plain_walk(context, b, mark.count, row, out, num, step, following)
        return context.get_dummy_value()

    return types.void(mark, types.int64, types.float32, *(types.int64,) * 3), codegen


@intrinsic
def unpack(typing_context, mark, row, out, num):  # type: ignore[no-untyped-def]
    """Write a row's ``num`` weights to ``out``."""

    def codegen(context, b, signature, args):
        _, row, out, num = args

        def step(weights, scale, place):
            store(b, weights if scale is None else b.fmul(weights, scale, flags=FLAGS), place, 0)

        _plain_walk(context, b, mark.count, row, out, num, step)
        return context.get_dummy_value()

    return types.void(mark, *(types.int64,) * 3), codegen
