"""exp of float32 without a branch or a call, so that loops around it become vector code."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import extending, types

from kairox_jax.host.compile import kernel
from kairox_jax.host.decode import FLOAT, call

intrinsic: Any = extending.intrinsic  # its callers do not pass the typing context

_LOG2E = np.float32(math.log2(math.e))
# ln 2 in two parts: the first has few bits, so that its multiples are exact.
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST, _MOST = np.float32(-87.0), np.float32(87.0)  # beyond, exp is no normal float32
# exp(r) = 1 + r + r^2 p(r) on |r| <= ln 2 / 2: Cephes' expf, relative error 2e-7.
_P0, _P1, _P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P3, _P4, _P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@intrinsic
def _nearest(typing_context, x):  # type: ignore[no-untyped-def]
    """Round float32 to the nearest whole number."""

    def codegen(context, b, signature, args):
        return call(b, "llvm.rint.f32", FLOAT, list(args))

    return types.float32(types.float32), codegen


@intrinsic
def _of_bits(typing_context, bits):  # type: ignore[no-untyped-def]
    """Read the bits of an int32 as float32."""

    def codegen(context, b, signature, args):
        return b.bitcast(args[0], FLOAT)

    return types.float32(types.int32), codegen


@kernel(inner=True)
def exp(x):
    """Return exp of a float32, taken as at least -87 and at most 87. NaN stays."""
    x = _LEAST if x < _LEAST else x
    x = _MOST if x > _MOST else x
    power = _nearest(x * _LOG2E)
    r = (x - power * _LN2_HIGH) - power * _LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    return (p * r * r + r + np.float32(1)) * _of_bits((np.int32(power) + np.int32(127)) << np.int32(23))
