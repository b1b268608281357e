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
# Rows that a pass over one token reads side by side, told by a tuple's length as well. The processor itself reads ahead
# in each of them, while its window of instructions holds too little of one row to keep memory busy beside the decoding.
SIDE_BY_SIDE, ALONE = (0,) * 4, (0,)


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


def _listed(b: Any, addresses: Any, count: int) -> list[Any]:
    return [load(b, addresses, 8 * r, I64) for r in range(count)]


@intrinsic
def dots(typing_context, mark, width, side, addresses, asked, x, num, out):  # type: ignore[no-untyped-def]
    """Multiply ``side`` listed rows with each of ``width`` prepared tokens.

    Writes floats [rows, width] to ``out``. ``asked`` lists as many rows as ``addresses``: see ``walk``.
    """

    def codegen(context, b, signature, args):
        _, _, _, addresses, asked, x, num, out = args
        code, listed, asked = mark.count, _listed(b, addresses, side.count), _listed(b, asked, side.count)
        if code >= INT8:
            integers.dots(context, b, code, width.count, listed, asked, x, num, out)
        elif (
            code < FIRST_COLUMN
        ):  # such columns are never read as rows, but the branch that would is compiled
            _float_dots(context, b, code, width.count, listed, asked, x, num, out)
        return context.get_dummy_value()

    return types.void(mark, width, side, *(types.int64,) * 5), codegen


def _float_dots(
    context: Any,
    b: Any,
    code: int,
    width: int,
    listed: list[Any],
    asked: list[Any],
    x: Any,
    num: Any,
    out: Any,
) -> None:
    _, decode, _ = LAYOUTS[code]
    target = target_of(context)
    zero = ir.Constant(VF, [0.0] * LANES)
    pairs = [(row, token) for row in range(len(listed)) for token in range(width)]
    # Independent sums hide the latency of additions.
    copies = max(1, 8 // len(pairs))
    sums = {pair: [cgutils.alloca_once_value(b, zero) for _ in range(copies)] for pair in pairs}
    tails = {pair: cgutils.alloca_once_value(b, ir.Constant(FLOAT, 0.0)) for pair in pairs}

    def add(into: Any, one: Any, other: Any) -> None:
        b.store(b.fadd(b.load(into), b.fmul(one, other, flags=FLAGS), flags=FLAGS), into)

    def block(index: int, ats: list[Any], place: Any) -> None:
        inputs = [
            [load(b, place, 4 * (BLOCK * token + LANES * half), VF) for half in (0, 1)]
            for token in range(width)
        ]
        for row, at in enumerate(ats):
            halves, scale = decode(b, at, target)
            if scale is not None and width > 1:
                halves, scale = [b.fmul(half, scale, flags=FLAGS) for half in halves], None
            for token in range(width):
                mine = sums[row, token]
                if scale is None:
                    for half in (0, 1):
                        add(mine[(2 * index + half) % copies], halves[half], inputs[token][half])
                else:  # a block is scaled once: three operations for 32 weights, not four
                    products = [
                        b.fmul(*pair, flags=FLAGS) for pair in zip(halves, inputs[token], strict=True)
                    ]
                    add(mine[index % copies], b.fadd(*products, flags=FLAGS), scale)

    def one(decode_one: Callable, ats: list[Any], place: Any) -> None:
        for row, at in enumerate(ats):
            weight = decode_one(b, at, target)
            for token in range(width):
                add(tails[row, token], weight, load(b, place, 4 * BLOCK * token, FLOAT))

    walk(b, code, listed, x, num, block, one, stride=4 * BLOCK * width, asked=asked)
    wholes = [_pairwise(b, [b.load(part) for part in sums[pair]]) for pair in pairs]
    for place, (pair, whole) in enumerate(zip(pairs, reduce_all(b, wholes), strict=True)):
        store(b, b.fadd(whole, b.load(tails[pair]), flags=FLAGS), out, 4 * place)


def _pairwise(b: Any, parts: list[Any]) -> Any:
    while len(parts) > 1:
        parts = [b.fadd(*pair, flags=FLAGS) for pair in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


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
def add_up(typing_context, slots, count, base, stride, out, num):  # type: ignore[no-untyped-def]
    """Write the sum of ``count`` float vectors to ``out``; number i begins at ``base + slots[i] * stride``."""

    def codegen(context, b, signature, args):
        slots, count, base, stride, out, num = args

        def some(kind, place):
            total = cgutils.alloca_once(b, kind)
            b.store(ir.Constant(kind, [0.0] * LANES if kind == VF else 0.0), total)
            with cgutils.for_range(b, count) as loop:
                slot = load(b, b.add(slots, b.shl(loop.index, ir.Constant(I64, 3))), 0, I64)
                part = load(b, b.add(b.add(base, b.mul(slot, stride)), place), 0, kind)
                b.store(b.fadd(b.load(total), part, flags=FLAGS), total)
            store(b, b.load(total), b.add(out, place), 0)

        whole = b.lshr(num, ir.Constant(I64, 4))
        with cgutils.for_range(b, whole) as loop:
            some(VF, b.shl(loop.index, ir.Constant(I64, 6)))
        begun = b.shl(whole, ir.Constant(I64, 4))
        with cgutils.for_range(b, b.sub(num, begun)) as loop:
            some(FLOAT, b.shl(b.add(begun, loop.index), ir.Constant(I64, 2)))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6), codegen


@intrinsic
def axpy(typing_context, mark, side, addresses, asked, factors, out, num):  # type: ignore[no-untyped-def]
    """Add ``side`` listed rows, each times its float at ``factors``, to ``num`` floats at ``out``.

    ``asked`` is as for ``dots``.
    """

    def codegen(context, b, signature, args):
        _, _, addresses, asked, factors, out, num = args
        if mark.count >= FIRST_COLUMN:
            return context.get_dummy_value()
        _, decode, _ = LAYOUTS[mark.count]
        target, listed, asked = (
            target_of(context),
            *(_listed(b, lst, side.count) for lst in (addresses, asked)),
        )
        times = [load(b, factors, 4 * row, FLOAT) for row in range(len(listed))]
        wide = [splat(b, factor) for factor in times]

        def block(index, ats, place):
            sums = [load(b, place, 4 * LANES * half, VF) for half in (0, 1)]
            for row, at in enumerate(ats):
                halves, scale = decode(b, at, target)
                factor = wide[row] if scale is None else b.fmul(wide[row], scale, flags=FLAGS)
                products = [b.fmul(half, factor, flags=FLAGS) for half in halves]
                sums = [b.fadd(*pair, flags=FLAGS) for pair in zip(sums, products, strict=True)]
            for half in (0, 1):
                store(b, sums[half], place, 4 * LANES * half)

        def one(decode_one, ats, place):
            total = load(b, place, 0, FLOAT)
            for factor, at in zip(times, ats, strict=True):
                total = b.fadd(total, b.fmul(decode_one(b, at, target), factor, flags=FLAGS), flags=FLAGS)
            store(b, total, place, 0)

        walk(b, mark.count, listed, out, num, block, one, stride=4 * BLOCK, asked=asked)
        return context.get_dummy_value()

    return types.void(mark, side, *(types.int64,) * 5), codegen


@intrinsic
def unpack(typing_context, mark, row, out, num):  # type: ignore[no-untyped-def]
    """Write a row's ``num`` weights to ``out``."""

    def codegen(context, b, signature, args):
        _, row, out, num = args
        if mark.count >= FIRST_COLUMN:
            return context.get_dummy_value()
        _, decode, _ = LAYOUTS[mark.count]
        target = target_of(context)

        def block(index, ats, place):
            halves, scale = decode(b, ats[0], target)
            for half, weights in enumerate(halves):
                weights = weights if scale is None else b.fmul(weights, scale, flags=FLAGS)
                store(b, weights, place, 4 * LANES * half)

        def one(decode_one, ats, place):
            store(b, decode_one(b, ats[0], target), place, 0)

        walk(b, mark.count, [row], out, num, block, one, stride=4 * BLOCK)
        return context.get_dummy_value()

    return types.void(mark, *(types.int64,) * 3), codegen
