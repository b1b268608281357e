"""How the threads of a parallel region share its work: tasks are taken one by one, stages wait for each other.

A thread that the system has stopped holds up what it has begun and nothing else, and whoever is there does all: with
equal shares, one slow core of two halves the speed. Who does a task never changes its result.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types

from kairox_jax.host.compile import kernel
from kairox_jax.host.decode import I64, call

intrinsic: Any = extending.intrinsic  # its callers do not pass the typing context
STAGE_BYTES = 128  # of the counters of a stage: tasks taken, and a cache line further tasks done
_DONE = 64


def _place(b: Any, address: Any) -> Any:
    return b.inttoptr(address, I64.as_pointer())


@intrinsic
def _add_one(typing_context, address):  # type: ignore[no-untyped-def]
    """Count one more; returns the number before. What was written before is seen by who reads the new number."""

    def codegen(context, b, signature, args):
        return b.atomic_rmw("add", _place(b, args[0]), ir.Constant(I64, 1), "acq_rel")

    return types.int64(types.int64), codegen


@intrinsic
def _read(typing_context, address):  # type: ignore[no-untyped-def]
    def codegen(context, b, signature, args):
        return b.load_atomic(_place(b, args[0]), ordering="acquire", align=8)

    return types.int64(types.int64), codegen


@intrinsic
def _relax(typing_context):  # type: ignore[no-untyped-def]
    """Let a waiting processor rest for some cycles."""

    def codegen(context, b, signature, args):
        triple = context.codegen().magic_tuple()[0]
        if triple.startswith(("x86", "i686")):
            call(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


@kernel(inner=True)
def clear(counters):
    """Begin anew; before the region, by its caller alone."""
    for place in range(counters.shape[0]):
        counters[place] = 0


@kernel(inner=True)
def take(counters, stage):
    """Return the number of a task of this stage that nobody has taken; from its last one on, one that is not there."""
    return _add_one(counters.ctypes.data + stage * STAGE_BYTES)


@kernel(inner=True)
def finish(counters, stage):
    """Say that a task is done."""
    _add_one(counters.ctypes.data + stage * STAGE_BYTES + _DONE)


@kernel(inner=True)
def wait(counters, stage, tasks):
    """Return when all tasks of a stage are done."""
    place = counters.ctypes.data + stage * STAGE_BYTES + _DONE
    while _read(place) < tasks:
        _relax()
