"""Inner loops over one packed row, as LLVM vector IR: dot product, scaled addition, unpacking.

Generic vectors of 16 floats: LLVM splits them for AVX2, NEON or plain SSE2, so one source serves every CPU.
A row is decoded to the float32 weights of ``quant.dequantize``; sums and Q4_1's minimum round otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# Builders and values are Any below: the stubs of llvmlite lack fast-math flags and alignments.
I8, I16, I32, I64, HALF, FLOAT = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.HalfType(),
    ir.FloatType(),
)
LANES = 16
# How far ahead of a loop memory is asked for. Measured on Q8_0 rows read in order, as a share of a plain
# streaming read: none 57 %, 1 or 2 KB 77 %, 4 KB 73 %, 8 KB 61 %.
AHEAD_BYTES = 1024
VF, V8, V16, V32 = (ir.VectorType(kind, LANES) for kind in (FLOAT, I8, I16, I32))
FLAGS = ("reassoc", "contract", "nsz")

# Codes of the formats in compiled code.
F32, F16, BF16, Q8_0, Q4_0, Q4_1 = range(6)
CODES = {"f32": F32, "f16": F16, "bf16": BF16, "q8_0": Q8_0, "q4_0": Q4_0, "q4_1": Q4_1}


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


def _prefetch(b: Any, address: Any, offset: int) -> None:
    """Ask for a cache line to be read once; an address that is not mapped does no harm."""
    pointer = b.inttoptr(b.add(address, ir.Constant(I64, offset)), I8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [pointer, *(ir.Constant(I32, n) for n in (0, 3, 1))])


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
        return b.fpext(b.bitcast(bits, shaped(HALF)), shaped(FLOAT))
    wide = b.zext(bits, shaped(I32))
    magnitude = b.bitcast(b.shl(b.and_(wide, constant(I32, 0x7FFF)), constant(I32, 13)), shaped(FLOAT))
    scaled = b.bitcast(b.fmul(magnitude, constant(FLOAT, 2.0**112)), shaped(I32))
    sign = b.shl(b.and_(wide, constant(I32, 0x8000)), constant(I32, 16))
    return b.bitcast(b.or_(scaled, sign), shaped(FLOAT))


def _decode_f32(b: Any, block: Any, native: bool) -> list[Any]:
    return [_load(b, block, 0, VF), _load(b, block, 64, VF)]


def _decode_f16(b: Any, block: Any, native: bool) -> list[Any]:
    return [_half(b, _load(b, block, offset, V16), native) for offset in (0, 2 * LANES)]


def _decode_bf16(b: Any, block: Any, native: bool) -> list[Any]:
    shift = ir.Constant(V32, [16] * LANES)
    bits = [b.zext(_load(b, block, offset, V16), V32) for offset in (0, 2 * LANES)]
    return [b.bitcast(b.shl(half, shift), VF) for half in bits]


def _scale(b: Any, block: Any, offset: int, native: bool) -> Any:
    return _splat(b, _half(b, _load(b, block, offset, I16), native))


def _decode_q8_0(b: Any, block: Any, native: bool) -> list[Any]:
    scale = _scale(b, block, 0, native)
    levels = [b.sext(_load(b, block, offset, V8), V32) for offset in (2, 2 + LANES)]
    return [b.fmul(b.sitofp(half, VF), scale, flags=FLAGS) for half in levels]


def _nibbles(b: Any, block: Any, offset: int) -> list[Any]:
    packed = _load(b, block, offset, V8)
    return [b.and_(packed, ir.Constant(V8, [15] * LANES)), b.lshr(packed, ir.Constant(V8, [4] * LANES))]


def _decode_q4_0(b: Any, block: Any, native: bool) -> list[Any]:
    scale = _scale(b, block, 0, native)
    levels = [b.sext(b.sub(half, ir.Constant(V8, [8] * LANES)), V32) for half in _nibbles(b, block, 2)]
    return [b.fmul(b.sitofp(half, VF), scale, flags=FLAGS) for half in levels]


def _decode_q4_1(b: Any, block: Any, native: bool) -> list[Any]:
    scale, least = _scale(b, block, 0, native), _scale(b, block, 2, native)
    levels = [b.sitofp(b.zext(half, V32), VF) for half in _nibbles(b, block, 4)]
    return [b.fadd(b.fmul(half, scale, flags=FLAGS), least, flags=FLAGS) for half in levels]


def _single_f32(b: Any, address: Any, native: bool) -> Any:
    return _load(b, address, 0, FLOAT)


def _single_f16(b: Any, address: Any, native: bool) -> Any:
    return _half(b, _load(b, address, 0, I16), native)


def _single_bf16(b: Any, address: Any, native: bool) -> Any:
    return b.bitcast(b.shl(b.zext(_load(b, address, 0, I16), I32), ir.Constant(I32, 16)), FLOAT)


# code -> (bytes of 32 weights, decode 32 weights to two vectors, decode one weight where rows may be ragged)
_LAYOUTS: dict[int, tuple[int, Callable, tuple[int, Callable] | None]] = {
    F32: (128, _decode_f32, (4, _single_f32)),
    F16: (64, _decode_f16, (2, _single_f16)),
    BF16: (64, _decode_bf16, (2, _single_bf16)),
    Q8_0: (34, _decode_q8_0, None),
    Q4_0: (18, _decode_q4_0, None),
    Q4_1: (20, _decode_q4_1, None),
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
        for line in range(0, block_bytes, 64):
            _prefetch(b, block, AHEAD_BYTES + line)
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


def _make_prefetch_head() -> Any:
    """Ask for the beginning of the record that comes next, where no loop runs ahead."""

    @intrinsic
    def prefetch_head(typing_context, record):  # type: ignore[no-untyped-def]
        def codegen(context, b, signature, args):
            for line in range(0, AHEAD_BYTES, 64):
                _prefetch(b, args[0], line)
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return prefetch_head


def _make_dot(code: int) -> Any:
    @intrinsic
    def dot(typing_context, row, x, num):  # type: ignore[no-untyped-def]
        def codegen(context, b, signature, args):
            row, x, num = args
            sums = [cgutils.alloca_once_value(b, ir.Constant(VF, [0.0] * LANES)) for _ in range(2)]
            tail = cgutils.alloca_once_value(b, ir.Constant(FLOAT, 0.0))

            def step(half, weights, place):
                into = tail if half is None else sums[half]
                product = b.fmul(weights, _load(b, place, 0, weights.type), flags=FLAGS)
                b.store(b.fadd(b.load(into), product, flags=FLAGS), into)

            _over_row(context, b, code, row, x, num, step)
            both = b.fadd(b.load(sums[0]), b.load(sums[1]), flags=FLAGS)
            reduce = cgutils.get_or_insert_function(
                b.module, ir.FunctionType(FLOAT, [FLOAT, VF]), "llvm.vector.reduce.fadd.v16f32"
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


prefetch_head = _make_prefetch_head()
dot_f32, axpy_f32 = _make_dot(F32), _make_axpy(F32)
dot_f16, axpy_f16, unpack_f16 = _make_dot(F16), _make_axpy(F16), _make_unpack(F16)
dot_bf16, axpy_bf16, unpack_bf16 = _make_dot(BF16), _make_axpy(BF16), _make_unpack(BF16)
dot_q8_0, axpy_q8_0, unpack_q8_0 = _make_dot(Q8_0), _make_axpy(Q8_0), _make_unpack(Q8_0)
dot_q4_0, axpy_q4_0, unpack_q4_0 = _make_dot(Q4_0), _make_axpy(Q4_0), _make_unpack(Q4_0)
dot_q4_1, axpy_q4_1, unpack_q4_1 = _make_dot(Q4_1), _make_axpy(Q4_1), _make_unpack(Q4_1)
