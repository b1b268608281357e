"""Inner loops over one packed row, as LLVM vector IR: dot product, scaled addition, unpacking.

Generic vectors of 16 floats: LLVM splits them for AVX2, NEON or plain SSE2, so one source serves every CPU.
A row is decoded to exactly the float32 weights that ``quant.dequantize`` gives; only sums differ in rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# Builders and values are Any below: the stubs of llvmlite lack fast-math flags and alignments.
I8, I16, I32, I64, F16, F32T = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.HalfType(),
    ir.FloatType(),
)
LANES = 16
VF = ir.VectorType(F32T, LANES)
FLAGS = ("reassoc", "contract", "nsz")

# Codes of the formats in compiled code.
F32, Q8_0 = range(2)
CODES = {"f32": F32, "q8_0": Q8_0}


def host_formats() -> tuple[str, ...]:
    """Return the formats that the host kernels read."""
    return tuple(CODES)


def _load(b: Any, address: Any, offset: int, kind: ir.Type) -> Any:
    pointer = b.inttoptr(b.add(address, ir.Constant(I64, offset)), kind.as_pointer())
    value = b.load(pointer)
    value.align = 1
    return value


def _store(b: Any, value: Any, address: Any, offset: int) -> None:
    pointer = b.inttoptr(b.add(address, ir.Constant(I64, offset)), value.type.as_pointer())
    b.store(value, pointer).align = 1


def _splat(b: Any, value: Any, lanes: int = LANES) -> Any:
    one = b.insert_element(
        ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined), value, ir.Constant(I32, 0)
    )
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def _half(b: Any, bits: Any, native: bool) -> Any:
    """Turn the bits of finite float16 numbers into float32, by arithmetic if the CPU has no instruction."""
    lanes = getattr(bits.type, "count", 0)

    def shaped(kind: ir.Type) -> ir.Type:
        return ir.VectorType(kind, lanes) if lanes else kind

    def constant(kind: ir.Type, number: Any) -> ir.Constant:
        return ir.Constant(shaped(kind), [number] * lanes if lanes else number)

    if native:
        return b.fpext(b.bitcast(bits, shaped(F16)), shaped(F32T))
    wide = b.zext(bits, shaped(I32))
    magnitude = b.bitcast(b.shl(b.and_(wide, constant(I32, 0x7FFF)), constant(I32, 13)), shaped(F32T))
    scaled = b.bitcast(b.fmul(magnitude, constant(F32T, 2.0**112)), shaped(I32))
    sign = b.shl(b.and_(wide, constant(I32, 0x8000)), constant(I32, 16))
    return b.bitcast(b.or_(scaled, sign), shaped(F32T))


def _decode_f32(b: Any, block: Any, native: bool) -> list[Any]:
    return [_load(b, block, 0, VF), _load(b, block, 64, VF)]


def _decode_q8_0(b: Any, block: Any, native: bool) -> list[Any]:
    scale = _splat(b, _half(b, _load(b, block, 0, I16), native))
    weights = []
    for offset in (2, 2 + LANES):
        levels = b.sext(_load(b, block, offset, ir.VectorType(I8, LANES)), ir.VectorType(I32, LANES))
        weights.append(b.fmul(b.sitofp(levels, VF), scale, flags=FLAGS))
    return weights


def _single_f32(b: Any, address: Any, native: bool) -> Any:
    return _load(b, address, 0, F32T)


# code -> (bytes of 32 weights, decode 32 weights to two vectors, decode one weight where rows may be ragged)
_LAYOUTS: dict[int, tuple[int, Callable, tuple[int, Callable] | None]] = {
    F32: (128, _decode_f32, (4, _single_f32)),
    Q8_0: (34, _decode_q8_0, None),
}


def _has_native_half(context: Any) -> bool:
    triple, _, features = context.codegen().magic_tuple()
    return not triple.startswith(("x86", "i686")) or "+f16c" in features.split(",")


def _over_row(
    context: Any,
    b: Any,
    code: int,
    row: Any,
    floats: Any,
    num: Any,
    step: Callable[[int | None, Any, Any], None],
) -> None:
    """Emit the loop over a row: ``step(half, weights, address)`` for 16 weights, half None for one."""
    block_bytes, decode, single = _LAYOUTS[code]
    native = _has_native_half(context)
    blocks = b.lshr(num, ir.Constant(I64, 5))
    with cgutils.for_range(b, blocks) as loop:
        block = b.add(row, b.mul(loop.index, ir.Constant(I64, block_bytes)))
        place = b.add(floats, b.shl(loop.index, ir.Constant(I64, 7)))
        for half, weights in enumerate(decode(b, block, native)):
            step(half, weights, b.add(place, ir.Constant(I64, 4 * LANES * half)))
    if single is None:
        return
    elem_bytes, decode_one = single
    done = b.shl(blocks, ir.Constant(I64, 5))
    with cgutils.for_range(b, b.sub(num, done)) as loop:
        index = b.add(done, loop.index)
        weight = decode_one(b, b.add(row, b.mul(index, ir.Constant(I64, elem_bytes))), native)
        step(None, weight, b.add(floats, b.shl(index, ir.Constant(I64, 2))))


def _make_dot(code: int) -> Any:
    @intrinsic
    def dot(typing_context, row, x, num):  # type: ignore[no-untyped-def]
        def codegen(context, b, signature, args):
            row, x, num = args
            sums = [cgutils.alloca_once_value(b, ir.Constant(VF, [0.0] * LANES)) for _ in range(2)]
            tail = cgutils.alloca_once_value(b, ir.Constant(F32T, 0.0))

            def step(half, weights, place):
                into = tail if half is None else sums[half]
                product = b.fmul(weights, _load(b, place, 0, weights.type), flags=FLAGS)
                b.store(b.fadd(b.load(into), product, flags=FLAGS), into)

            _over_row(context, b, code, row, x, num, step)
            both = b.fadd(b.load(sums[0]), b.load(sums[1]), flags=FLAGS)
            reduce = cgutils.get_or_insert_function(
                b.module, ir.FunctionType(F32T, [F32T, VF]), "llvm.vector.reduce.fadd.v16f32"
            )
            return b.call(reduce, [b.load(tail), both], fastmath=FLAGS)

        return types.float32(types.int64, types.int64, types.int64), codegen

    return dot


def _make_axpy(code: int) -> Any:
    @intrinsic
    def axpy(typing_context, row, factor, out, num):  # type: ignore[no-untyped-def]
        def codegen(context, b, signature, args):
            row, factor, out, num = args
            wide = _splat(b, factor)

            def step(half, weights, place):
                product = b.fmul(weights, factor if half is None else wide, flags=FLAGS)
                _store(b, b.fadd(_load(b, place, 0, weights.type), product, flags=FLAGS), place, 0)

            _over_row(context, b, code, row, out, num, step)
            return context.get_dummy_value()

        return types.void(types.int64, types.float32, types.int64, types.int64), codegen

    return axpy


def _make_unpack(code: int) -> Any:
    @intrinsic
    def unpack(typing_context, row, out, num):  # type: ignore[no-untyped-def]
        def codegen(context, b, signature, args):
            row, out, num = args
            _over_row(
                context, b, code, row, out, num, lambda half, weights, place: _store(b, weights, place, 0)
            )
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return unpack


dot_f32, axpy_f32 = _make_dot(F32), _make_axpy(F32)
dot_q8_0, axpy_q8_0, unpack_q8_0 = _make_dot(Q8_0), _make_axpy(Q8_0), _make_unpack(Q8_0)
