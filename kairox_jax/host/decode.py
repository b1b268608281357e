"""Packed weights as LLVM vectors: loads, prefetch, and the decoding of 32 weights of each format.

Generic vectors of 16 floats: LLVM splits them for AVX2, NEON or plain SSE2, so one source serves every CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

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
BLOCK = 32  # weights, of every format
VF, V8, V16, V32 = (ir.VectorType(kind, LANES) for kind in (FLOAT, I8, I16, I32))
FLAGS = ("reassoc", "contract", "nsz")

# Codes of the formats; those from FIRST_COLUMN on are read by ``host.columns``, those from INT8 on are rows whose
# inputs ``host.integers`` has rounded to int8.
F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q8_0_COLUMN, Q4_0_COLUMN, Q4_1_COLUMN = range(1, 10)
FIRST_COLUMN, INT8 = Q8_0_COLUMN, 16
CODES = {"f32": F32, "f16": F16, "bf16": BF16, "q8_0": Q8_0, "q4_0": Q4_0, "q4_1": Q4_1}
COLUMN_CODES = {"q8_0_column": Q8_0_COLUMN, "q4_0_column": Q4_0_COLUMN, "q4_1_column": Q4_1_COLUMN}
INT8_CODES = {name: INT8 + CODES[name] for name in ("q8_0", "q4_0", "q4_1")}


class Target(NamedTuple):
    """What the CPU that is compiled for can do.

    Attributes:
        has_half: converts float16 by an instruction.
        has_permute: looks up 16 floats in a register (AVX-512).
        has_bytes: adds up products of int8 pairs (AVX2).
        has_byte_dots: adds up products of four int8 into int32 (VNNI).
    """

    has_half: bool
    has_permute: bool
    has_bytes: bool
    has_byte_dots: bool


def target_of(context: Any) -> Target:
    """Return the abilities of a compiler context's CPU."""
    triple, _, features = context.codegen().magic_tuple()
    is_x86, listed = triple.startswith(("x86", "i686")), set(features.split(","))
    return Target(
        has_half=not is_x86 or "+f16c" in listed,
        has_permute=is_x86 and "+avx512f" in listed,
        has_bytes=is_x86 and "+avx2" in listed,
        has_byte_dots=is_x86 and {"+avx512vnni", "+avx512vl"} <= listed,
    )


def call(b: Any, name: str, result: ir.Type, args: list[Any]) -> Any:
    """Call one of LLVM's own functions."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def load(b: Any, address: Any, offset: int, kind: ir.Type) -> Any:
    pointer = b.inttoptr(b.add(address, ir.Constant(I64, offset)), kind.as_pointer())
    value = b.load(pointer)
    value.align = 1
    return value


def store(b: Any, value: Any, address: Any, offset: int) -> None:
    pointer = b.inttoptr(b.add(address, ir.Constant(I64, offset)), value.type.as_pointer())
    b.store(value, pointer).align = 1


def prefetch(b: Any, address: Any, offset: int) -> None:
    """Ask for a cache line in the second cache; an address that is not mapped does no harm."""
    pointer = b.inttoptr(b.add(address, ir.Constant(I64, offset)), I8.as_pointer())
    call(b, "llvm.prefetch.p0", ir.VoidType(), [pointer, *(ir.Constant(I32, n) for n in (0, 2, 1))])


def splat(b: Any, value: Any, lanes: int = LANES) -> Any:
    one = b.insert_element(
        ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined), value, ir.Constant(I32, 0)
    )
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def half_to_float(b: Any, bits: Any, target: Target) -> Any:
    """Turn the bits of finite float16 numbers into float32, by arithmetic if the CPU has no instruction."""
    lanes = getattr(bits.type, "count", 0)

    def shaped(kind: ir.Type) -> ir.Type:
        return ir.VectorType(kind, lanes) if lanes else kind

    def constant(kind: ir.Type, number: Any) -> ir.Constant:
        return ir.Constant(shaped(kind), [number] * lanes if lanes else number)

    if target.has_half:
        return b.fpext(b.bitcast(bits, shaped(HALF)), shaped(FLOAT))
    wide = b.zext(bits, shaped(I32))
    magnitude = b.bitcast(b.shl(b.and_(wide, constant(I32, 0x7FFF)), constant(I32, 13)), shaped(FLOAT))
    scaled = b.bitcast(b.fmul(magnitude, constant(FLOAT, 2.0**112)), shaped(I32))
    sign = b.shl(b.and_(wide, constant(I32, 0x8000)), constant(I32, 16))
    return b.bitcast(b.or_(scaled, sign), shaped(FLOAT))


# A decoder gives 32 weights as two vectors, and the scale that both still need, or None.
Decoded = tuple[list[Any], Any | None]


def _decode_f32(b: Any, block: Any, target: Target) -> Decoded:
    return [load(b, block, 0, VF), load(b, block, 64, VF)], None


def _decode_f16(b: Any, block: Any, target: Target) -> Decoded:
    return [half_to_float(b, load(b, block, offset, V16), target) for offset in (0, 2 * LANES)], None


def _decode_bf16(b: Any, block: Any, target: Target) -> Decoded:
    shift = ir.Constant(V32, [16] * LANES)
    bits = [b.zext(load(b, block, offset, V16), V32) for offset in (0, 2 * LANES)]
    return [b.bitcast(b.shl(half, shift), VF) for half in bits], None


def _scale(b: Any, block: Any, offset: int, target: Target) -> Any:
    """Load a float16 number and give it to every lane; one number is converted faster than a whole vector of it."""
    return splat(b, half_to_float(b, load(b, block, offset, I16), target))


def levels_8(b: Any, address: Any, offset: int) -> list[Any]:
    """Load 32 int8 codes as two vectors of float32."""
    return [b.sitofp(b.sext(load(b, address, offset + at, V8), V32), VF) for at in (0, LANES)]


def levels_4(b: Any, address: Any, offset: int, zero: int, target: Target) -> list[Any]:
    """Load 32 codes of 4 bits, less ``zero``, as two vectors of float32.

    AVX-512 looks them up in a register: its permutation reads the low 4 bits of an index, so none are masked.
    """
    packed = b.zext(load(b, address, offset, V8), V32)
    high = b.lshr(packed, ir.Constant(V32, [4] * LANES))
    if target.has_permute:
        table = ir.Constant(VF, [float(code - zero) for code in range(16)])
        return [call(b, "llvm.x86.avx512.permvar.sf.512", VF, [table, index]) for index in (packed, high)]
    low = b.and_(packed, ir.Constant(V32, [15] * LANES))
    taken = ir.Constant(V32, [zero] * LANES)
    return [b.sitofp(b.sub(half, taken) if zero else half, VF) for half in (low, high)]


def _decode_q8_0(b: Any, block: Any, target: Target) -> Decoded:
    return levels_8(b, block, 2), _scale(b, block, 0, target)


def _decode_q4_0(b: Any, block: Any, target: Target) -> Decoded:
    return levels_4(b, block, 2, 8, target), _scale(b, block, 0, target)


def _decode_q4_1(b: Any, block: Any, target: Target) -> Decoded:
    both = half_to_float(b, load(b, block, 0, ir.VectorType(I16, 2)), target)
    scale, least = (splat(b, b.extract_element(both, ir.Constant(I32, place))) for place in (0, 1))
    levels = levels_4(b, block, 4, 0, target)
    return [b.fadd(b.fmul(half, scale, flags=FLAGS), least, flags=FLAGS) for half in levels], None


def _single_f32(b: Any, address: Any, target: Target) -> Any:
    return load(b, address, 0, FLOAT)


def _single_f16(b: Any, address: Any, target: Target) -> Any:
    return half_to_float(b, load(b, address, 0, I16), target)


def _single_bf16(b: Any, address: Any, target: Target) -> Any:
    return b.bitcast(b.shl(b.zext(load(b, address, 0, I16), I32), ir.Constant(I32, 16)), FLOAT)


# code -> (bytes of 32 weights, decode 32 weights to two vectors, decode one weight where rows may be ragged)
LAYOUTS: dict[int, tuple[int, Callable, tuple[int, Callable] | None]] = {
    F32: (128, _decode_f32, (4, _single_f32)),
    F16: (64, _decode_f16, (2, _single_f16)),
    BF16: (64, _decode_bf16, (2, _single_bf16)),
    Q8_0: (34, _decode_q8_0, None),
    Q4_0: (18, _decode_q4_0, None),
    Q4_1: (20, _decode_q4_1, None),
}


def block_bytes(name: str) -> int:
    """Return the bytes that 32 weights of a row take, or of a down column whose scales are shared."""
    if name in COLUMN_CODES:
        return BLOCK if COLUMN_CODES[name] == Q8_0_COLUMN else BLOCK // 2
    return LAYOUTS[CODES[name]][0]
