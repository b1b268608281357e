"""The host's share of an FFN as an XLA FFI handler: a compiled function that XLA calls without Python or its lock.

Reads XLA's call frame by offsets (``xla/ffi/api/c_api.h``, the same in the versions of ``KNOWN_MINORS``).
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numba
import numpy as np
from llvmlite import ir
from numba import extending, set_num_threads, types
from numba.core.imputils import impl_ret_borrowed

from kairox_jax.host import crew, loops, rows, threads
from kairox_jax.host.calls import chunk_of
from kairox_jax.host.compile import kernel

intrinsic: Any = extending.intrinsic  # its callers do not pass the typing context
TARGET = "kairox_host_ffn"
KNOWN_MINORS = (3, 4, 5)  # of the FFI's version 0
# Columns of the table that tells the handler where a layer's neurons are, int64 [L, COLUMNS].
(
    RECORDS,
    NEURONS,
    RECORD_BYTES,
    BIASES,
    BIAS_COLUMNS,
    SCALES,
    MINIMA,
    GROUPS,
    GATED,
    ROW_BYTES,
    RULE,
    THREADS,
) = range(12)
COLUMNS = 12

_chunk_of: Any = kernel(inner=True)(chunk_of)
Address = types.uint64
Word = Address  # of the frame


def ffi_minor_version() -> int:
    """Return the minor version of this jaxlib's FFI.

    Raises:
        ValueError: the version is unknown, so that the layout of a call frame is too.
    """
    header = Path(str(jaxlib.__file__)).parent / "include/xla/ffi/api/c_api.h"
    found = re.search(r"define XLA_FFI_API_MINOR (\d+)", header.read_text() if header.exists() else "")
    minor = int(found[1]) if found else -1
    if minor not in KNOWN_MINORS:
        raise ValueError(
            f"host callback 'ffi' knows XLA's FFI 0.{KNOWN_MINORS[0]} to 0.{KNOWN_MINORS[-1]}, not 0.{minor}: "
            "use 'split'"
        )
    return minor


def _make_load(result: Any, llvm: ir.Type) -> Any:
    @intrinsic
    def load(typing_context, address):  # type: ignore[no-untyped-def]
        def codegen(context, b, signature, args):
            return b.load(b.inttoptr(args[0], llvm.as_pointer()))

        return result(types.uint64), codegen

    return load


def _make_pointer(element: Any, llvm: ir.Type) -> Any:
    @intrinsic
    def pointer(typing_context, address):  # type: ignore[no-untyped-def]
        def codegen(context, b, signature, args):
            return b.inttoptr(args[0], llvm.as_pointer())

        return types.CPointer(element)(types.uint64), codegen

    return pointer


def _store(typing_context, address, value):  # type: ignore[no-untyped-def]
    def codegen(context, b, signature, args):
        b.store(args[1], b.inttoptr(args[0], ir.IntType(32).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.uint64, types.int32), codegen


_store_i32: Any = intrinsic(_store)


@intrinsic
def _read_only(typing_context, array):  # type: ignore[no-untyped-def]
    """Return an array as one that cannot be written, as other callers of the loops give it: they are compiled once."""

    def codegen(context, b, signature, args):
        return impl_ret_borrowed(context, b, signature.return_type, args[0])

    return array.copy(readonly=True)(array), codegen


@intrinsic
def _plain(typing_context, mark):  # type: ignore[no-untyped-def]
    """Return a mark as one whose zeros the compiler does not know, as other callers give it."""
    kind = types.UniTuple(types.int64, mark.count)

    def codegen(context, b, signature, args):
        return context.get_constant_null(kind)

    return kind(mark), codegen


carray: Any = numba.carray  # pyright: ignore[reportPrivateImportUsage]
_load_word = _make_load(types.uint64, ir.IntType(64))
_load_i32 = _make_load(types.int32, ir.IntType(32))
_bytes_at = _make_pointer(types.uint8, ir.IntType(8))
_floats_at = _make_pointer(types.float32, ir.FloatType())
_ints_at = _make_pointer(types.int32, ir.IntType(32))
_halves_at = _make_pointer(types.uint16, ir.IntType(16))
_words_at = _make_pointer(types.int64, ir.IntType(64))


@kernel()
def _buffer(frame, start, index):
    """Return the address of argument (start 72) or result (start 112) number ``index``."""
    return _load_word(_load_word(frame + Address(start)) + Address(8 * index))


@kernel()
def _data(frame, start, index):
    return _load_word(_buffer(frame, start, index) + Address(24))


@kernel()
def _dim(frame, start, index, axis):
    return np.int64(_load_word(_load_word(_buffer(frame, start, index) + Address(40)) + Address(8 * axis)))


@kernel()
def _answers_metadata(frame, minor):
    """Tell XLA the version, where it asks for that and nothing else (once, at registration)."""
    extension = _load_word(frame + Address(8))
    if extension == Address(0) or _load_i32(extension + Address(8)) != 1:
        return False
    metadata = _load_word(extension + Address(24))
    _store_i32(metadata + Address(24), np.int32(0))
    _store_i32(metadata + Address(28), np.int32(minor))
    _store_i32(metadata + Address(32), np.int32(0))
    return True


@kernel()
def _run(frame, mark, width, down_mark):
    """Evaluate: arguments x [B,D], ids [K], n [], layer [], table as bytes, thresholds [L]; results y, active."""
    batch, num, listed = _dim(frame, 72, 0, 0), _dim(frame, 72, 0, 1), _dim(frame, 72, 1, 0)
    x = carray(_floats_at(_data(frame, 72, 0)), (batch, num))
    n, layer = _load_i32(_data(frame, 72, 2)), _load_i32(_data(frame, 72, 3))
    ids = carray(_ints_at(_data(frame, 72, 1)), (listed,))[:n]
    row = carray(_words_at(_data(frame, 72, 4) + Address(8 * COLUMNS * layer)), (COLUMNS,))
    limit = carray(_floats_at(_data(frame, 72, 5) + Address(4 * layer)), (1,))[0]
    y = carray(_floats_at(_data(frame, 112, 0)), (batch, num))
    active = carray(_bytes_at(_data(frame, 112, 1)), (batch, listed))
    records = carray(_bytes_at(Address(row[RECORDS])), (row[NEURONS], row[RECORD_BYTES]))
    bias_rows = row[NEURONS] if row[BIAS_COLUMNS] else 0
    biases = carray(_floats_at(Address(row[BIASES])), (bias_rows, row[BIAS_COLUMNS]))
    padded = (num + 31) // 32 * 32
    scales = carray(_halves_at(Address(row[SCALES])), (row[GROUPS], padded))
    minima = carray(_halves_at(Address(row[MINIMA])), (row[GROUPS] if row[MINIMA] else 0, padded))
    active[:] = 0
    chunk = _chunk_of(n)
    slots = np.empty((n + chunk - 1) // chunk, np.int64)
    partials = np.empty((row[THREADS] * slots.shape[0], len(width), padded), np.float32)
    inputs = np.empty(padded * len(width), np.float32)
    loops.ffn(
        _read_only(x), inputs, _read_only(records), row[GATED] != 0, _plain(mark), _plain(width), _plain(down_mark),
        row[ROW_BYTES], _read_only(biases), _read_only(scales), _read_only(minima), ids,
        chunk, row[RULE], limit, partials, slots, y, active, np.empty(3 * crew.STAGE_BYTES // 8, np.int64),
        row[THREADS],
    )  # fmt: skip


@kernel()
def _threads(frame):
    return np.int64(_load_word(_data(frame, 72, 4) + Address(8 * THREADS)))


@functools.cache
def register(format: str, down_format: str) -> str:
    """Compile the handler and make it known to XLA's CPU platform; return its name for ``jax.ffi.ffi_call``.

    Args:
        format, down_format: of the records' first row and of their down columns.

    Raises:
        ValueError: an unknown version of the FFI, or a threading layer that aborts under two callers.
    """
    layer = threads.start()
    if layer == "workqueue":
        raise ValueError(
            "host callback 'ffi' needs numba's OpenMP or TBB layer, found workqueue: install libgomp, or use 'split'"
        )

    mark, down_mark = rows.MARKS[format], rows.MARKS[down_format]
    narrow, middle, wide = (rows.width_of(width) for width in rows.WIDTHS)

    @numba.njit
    def work(frame):  # type: ignore[no-untyped-def]
        set_num_threads(_threads(frame))  # of the calling thread, which is one of XLA's
        batch = _dim(frame, 72, 0, 0)
        if batch == 1:
            _run(frame, mark, narrow, down_mark)
        elif batch <= 4:
            _run(frame, mark, middle, down_mark)
        else:
            _run(frame, mark, wide, down_mark)

    name = f"{TARGET}_{format}_{down_format}"
    jax.ffi.register_ffi_target(name, make_handler(work), platform="cpu")
    return name


def make_handler(work: Callable[[Any], None]) -> Any:
    """Compile an FFI handler that calls ``work(frame)``, and return it as ``jax.ffi.register_ffi_target`` takes it.

    Args:
        work: a numba function of the call frame's address.

    Raises:
        ValueError: this jaxlib's FFI has an unknown version.
    """
    minor = ffi_minor_version()

    def handle(frame):  # type: ignore[no-untyped-def]
        if not _answers_metadata(frame, minor):
            work(frame)
        return Address(0)

    handler = numba.cfunc(types.uint64(types.uint64))(handle)
    _kept.append(handler)
    return _capsule(handler.address or 0)


_kept: list[Any] = []  # machine code lives as long as its Python object


def _capsule(address: int) -> Any:
    new: Callable[..., Any] = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object  # type: ignore[attr-defined]
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]  # type: ignore[attr-defined]
    return new(address, None, None)
