"""Products with inputs that are rounded to int8: a scale for 4 of them, or 8 where several tokens share a pass.

With codes c of a row (zero z, scale s, minimum m) and rounded inputs q (scale d) each group adds
s d (sum of c q - z sum of q) + m d (sum of q); sums of c q are int32. The sums over q alone are made once, where the
input is rounded. LLVM vector IR.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kairox_jax.host.decode import (
    FLAGS,
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    INT8,
    LANES,
    Q4_0,
    Q4_1,
    Q8_0,
    V8,
    V32,
    VF,
    Target,
    call,
    half_to_float,
    load,
    splat,
    store,
    target_of,
)
from kairox_jax.host.walk import walk

_BYTES, _INTS, _SHORTS = ir.VectorType(I8, 32), ir.VectorType(I32, 8), ir.VectorType(I16, 16)
_ZEROS = {Q8_0: 128, Q4_0: 8, Q4_1: 0}  # of a row's codes, read as unsigned
_LEAST = 1e-30  # inputs that are all smaller count as zero: the reciprocal of their scale would overflow


class _Places:
    """Where a block of prepared inputs keeps its parts, in bytes.

    A vector's lanes are the groups of one token (8 of 4 inputs), or 4 groups of 8 inputs for each of 4 tokens:
    [group][token]. ``codes``, at 0: int8, four for each lane; then, for several tokens, the lanes' second four.
    ``begin``: int32, what a sum starts with: minus the row's zero times the sum of a group's codes.
    ``scales``: float32. ``sums``: float32, scale times the sum of the codes.
    """

    def __init__(self, width: int) -> None:
        self.fours = max(1, width // 4)  # vectors for a block, each for up to four tokens
        self.lanes, self.group, self.rounds = (8, 4, 1) if width == 1 else (16, 8, 2)
        size = 4 * self.lanes * self.fours
        self.begin, self.scales, self.sums, self.stride = (size * (self.rounds + part) for part in range(4))


def _i32(number: int) -> ir.Constant:
    return ir.Constant(I32, number)


def _filled(kind: ir.VectorType, number: Any) -> ir.Constant:
    return ir.Constant(kind, [number] * kind.count)


def _vector(kind: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(kind, lanes)


def _picked(b: Any, vector: Any, lanes: list[int]) -> Any:
    return b.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _rounded(b: Any, at: Any, group: int) -> tuple[Any, Any, Any]:
    """Round 16 floats; returns codes, and in each lane its group's scale (NaN where one is NaN) and sum of codes."""
    values = load(b, at, 0, VF)
    steps = [[lane ^ step for lane in range(LANES)] for step in (1, 2, 4) if step < group]
    most = b.and_(
        b.bitcast(values, V32), _filled(V32, 0x7FFFFFFF)
    )  # ordered as the floats; a NaN is the largest
    for step in steps:
        other = _picked(b, most, step)
        most = b.select(b.icmp_unsigned(">", most, other), most, other)
    most = b.bitcast(most, VF)
    counts = b.and_(
        b.fcmp_ordered(">", most, _filled(VF, _LEAST)), b.fcmp_ordered("<", most, _filled(VF, float("inf")))
    )
    inverse = b.select(counts, b.fdiv(_filled(VF, 127.0), most), _filled(VF, 0.0))
    nearest = call(b, "llvm.rint.v16f32", VF, [b.fmul(values, inverse)])
    codes = total = call(b, "llvm.fptosi.sat.v16i32.v16f32", V32, [nearest])
    for step in steps:
        total = b.add(total, _picked(b, total, step))
    return codes, b.fmul(most, _filled(VF, 1 / 127)), total


def round_token(
    context: Any, b: Any, code: int, width: int, source: Any, token: Any, blocks: Any, out: Any
) -> None:
    """Emit the rounding of one token's floats at ``source``, into the blocks at ``out``."""
    places, zero = _Places(width), _ZEROS[code % INT8]
    lane = b.add(
        b.shl(b.lshr(token, ir.Constant(I64, 2)), ir.Constant(I64, 6)),
        b.shl(b.and_(token, ir.Constant(I64, 3)), ir.Constant(I64, 2)),
    )
    with cgutils.for_range(b, blocks) as loop:
        block = b.add(out, b.mul(loop.index, ir.Constant(I64, places.stride)))
        for half in (0, 1):
            at = b.add(source, b.add(b.shl(loop.index, ir.Constant(I64, 7)), ir.Constant(I64, 64 * half)))
            codes, scales, totals = _rounded(b, at, places.group)
            parts = (
                (places.begin, b.mul(totals, _filled(V32, -zero))),
                (places.scales, scales),
                (places.sums, b.fmul(scales, b.sitofp(totals, VF))),
            )
            small = b.trunc(codes, V8)
            if width == 1:
                store(b, small, block, 16 * half)
                for place, values in parts:
                    store(b, _picked(b, values, [0, 4, 8, 12]), block, place + 16 * half)
                continue
            quads = b.bitcast(small, _vector(I32, 4))
            for group in (0, 1):
                at = b.add(b.add(block, lane), ir.Constant(I64, 16 * (2 * half + group)))
                for k in range(2):
                    store(b, b.extract_element(quads, _i32(2 * group + k)), at, 64 * places.fours * k)
                for place, values in parts:
                    store(b, b.extract_element(values, _i32(8 * group)), at, place)


def _add_products(b: Any, sums: Any, codes: Any, inputs: Any, target: Target, small: bool) -> Any:
    """Add to each int32 the four products of its unsigned ``codes`` and signed ``inputs`` (-127 to 127).

    Codes and inputs are vectors of int32 too. ``small`` codes are below 16: two products then fit into 16 bits.
    """
    lanes = sums.type.count
    if target.has_byte_dots:
        # LLVM's older declaration, with vectors of int32, which newer ones translate.
        return call(b, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", sums.type, [sums, codes, inputs])
    if target.has_bytes and lanes > 8:
        halves = [
            _add_products(
                b, _picked(b, sums, part), _picked(b, codes, part), _picked(b, inputs, part), target, small
            )
            for part in (list(range(8)), list(range(8, 16)))
        ]
        return b.shuffle_vector(*halves, ir.Constant(V32, list(range(LANES))))
    if target.has_bytes:

        def pairs(part: Any, times: int) -> Any:
            args = [part, b.bitcast(inputs, _BYTES)]
            shorts = call(b, "llvm.x86.avx2.pmadd.ub.sw", _SHORTS, args)
            return call(b, "llvm.x86.avx2.pmadd.wd", _INTS, [shorts, _filled(_SHORTS, times)])

        codes = b.bitcast(codes, _BYTES)
        if small:
            return b.add(sums, pairs(codes, 1))
        upper = b.lshr(codes, _filled(_BYTES, 1))  # 127 at most, so that two products fit
        return b.add(b.add(sums, pairs(upper, 2)), pairs(b.and_(codes, _filled(_BYTES, 1)), 1))
    for place in range(0, 32, 8):
        code = b.and_(b.lshr(codes, _filled(codes.type, place)), _filled(codes.type, 255))
        shifted = b.shl(inputs, _filled(codes.type, 24 - place))
        sums = b.add(sums, b.mul(code, b.ashr(shifted, _filled(codes.type, 24))))
    return sums


def _row_codes(b: Any, format: int, block: Any) -> Any:
    """Load a block's 32 codes as unsigned bytes, in 8 vectors' lanes of four."""
    if format == Q8_0:
        return b.bitcast(b.xor(load(b, block, 2, _BYTES), _filled(_BYTES, -128)), _INTS)
    packed = _picked(b, load(b, block, 4 if format == Q4_1 else 2, V8), 2 * list(range(LANES)))
    shifted = b.lshr(b.bitcast(packed, _INTS), ir.Constant(_INTS, [0] * 4 + [4] * 4))
    return b.and_(shifted, _filled(_INTS, 0x0F0F0F0F))


def _row_scales(b: Any, format: int, block: Any, lanes: int, target: Target) -> tuple[Any, Any | None]:
    """Load a block's scale into every lane, and its minimum, or None."""
    if format != Q4_1:
        return half_to_float(b, splat(b, load(b, block, 0, I16), lanes), target), None
    both = b.bitcast(splat(b, load(b, block, 0, I32), lanes // 2), _vector(I16, lanes))
    numbers = half_to_float(b, both, target)
    even = [lane // 2 * 2 for lane in range(lanes)]
    return _picked(b, numbers, even), _picked(b, numbers, [lane + 1 for lane in even])


def dots(
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
    """Emit the products of rows with ``width`` rounded tokens; see ``rows.dots``."""
    format, places, target = code % INT8, _Places(width), target_of(context)
    ints, floats, size = _vector(I32, places.lanes), _vector(FLOAT, places.lanes), 4 * places.lanes
    copies = 2 if width > 1 else 1  # independent sums hide the latency of additions
    zero = _filled(floats, 0.0)
    sums = [
        [[cgutils.alloca_once_value(b, zero) for _ in range(copies)] for _ in range(places.fours)]
        for _ in listed
    ]

    def products(at: Any, place: Any) -> list[Any]:
        codes = _row_codes(b, format, at)
        wholes = [load(b, place, places.begin + size * four, ints) for four in range(places.fours)]
        for k in range(places.rounds):
            mine = codes
            if width > 1:  # each of the row's four codes to the four tokens
                mine = _picked(b, codes, [2 * group + k for group in range(4) for _ in range(4)])
            for four in range(places.fours):
                inputs = load(b, place, size * (places.fours * k + four), ints)
                wholes[four] = _add_products(b, wholes[four], mine, inputs, target, format != Q8_0)
        return wholes

    def block(index: int, ats: list[Any], place: Any) -> None:
        for row, at in enumerate(ats):
            scale, least = _row_scales(b, format, at, places.lanes, target)
            for four, whole in enumerate(products(at, place)):
                factor = b.fmul(scale, load(b, place, places.scales + size * four, floats), flags=FLAGS)
                part = b.fmul(b.sitofp(whole, floats), factor, flags=FLAGS)
                if least is not None:
                    inputs = load(b, place, places.sums + size * four, floats)
                    part = b.fadd(part, b.fmul(least, inputs, flags=FLAGS), flags=FLAGS)
                into = sums[row][four][index % copies]
                b.store(b.fadd(b.load(into), part, flags=FLAGS), into)

    walk(b, code, listed, x, num, block, lambda *ragged: None, stride=places.stride, asked=asked)
    for place, parts in enumerate(part for row in sums for part in row):
        whole, lanes = _whole(b, parts), places.lanes
        while lanes > (1 if width == 1 else 4):
            lanes //= 2
            low, high = list(range(lanes)), list(range(lanes, 2 * lanes))
            whole = b.fadd(_picked(b, whole, low), _picked(b, whole, high), flags=FLAGS)
        store(b, whole, out, (4 if width == 1 else 16) * place)


def _whole(b: Any, parts: list[Any]) -> Any:
    """Return the sum of vectors in memory."""
    values = [b.load(part) for part in parts]
    while len(values) > 1:
        values = [b.fadd(*pair, flags=FLAGS) for pair in zip(values[::2], values[1::2], strict=True)]
    return values[0]
