"""A whole step of a few tokens in one parallel region: the attention and the FFN of one layer after the other.

Layer by layer from Python, a token of a small model spent much of its time between the kernels. What differs from
layer to layer comes as a table of addresses; the layers of a call are alike in everything else. Arguments are not
checked here: call ``step``.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from llvmlite import ir
from numba import extending, prange, types
from numba.core import cgutils
from numba.np.numpy_support import carray

from kairox_jax.host.attention_loops import ROWS_PER_CHUNK, merge, mix_share, norm_rows
from kairox_jax.host.compile import kernel
from kairox_jax.host.crew import clear, finish, take, wait
from kairox_jax.host.decode import I32, I64, call
from kairox_jax.host.loops import SLICE, ffn_share, prepare, product_share

intrinsic: Any = extending.intrinsic  # its callers do not pass the typing context
# Columns of the table of addresses; ADDED is of what the FFN of the layer before adds besides its neurons.
(
    NORM,
    NORM_BIAS,
    WQKV,
    BQKV,
    KEYS,
    VALUES,
    WO,
    BO,
    FFN_NORM,
    FFN_NORM_BIAS,
    RECORDS,
    BIASES,
    SCALES,
    MINIMA,
    ADDED,
) = range(15)
NUM_PLACES = 15
# Of a layer: entering, first product, cache, heads, preparing, second product, merging; then neurons and their sums.
ATTENTION_STAGES = 7
STAGES = ATTENTION_STAGES + 2
_MONOTONIC = 6 if sys.platform == "darwin" else 1  # as its C header numbers CLOCK_MONOTONIC
_ENTER, _QKV, _MIX, _PREPARE, _OUT, _MERGE = 0, 1, 2, 4, 5, 6


class Sizes(NamedTuple):
    """Shapes of what lies at the addresses; vectors that a model does not have are of size 0.

    Attributes:
        norm_bias, bqkv, bo, added: sizes of vectors.
        qkv_rows, qkv_bytes, out_rows, out_bytes: of the two matrices.
        cache_rows, kv_heads, positions, head_dim: of keys and values.
        neurons, record_bytes: of the records.
        biased, biases: neurons with biases, all or none, and how many one has.
        scales, minima: rows of these tables.
        columns: of both.
    """

    norm_bias: int
    bqkv: int
    bo: int
    added: int
    qkv_rows: int
    qkv_bytes: int
    out_rows: int
    out_bytes: int
    cache_rows: int
    kv_heads: int
    positions: int
    head_dim: int
    neurons: int
    record_bytes: int
    biased: int
    biases: int
    scales: int
    minima: int
    columns: int


def _pointer_to(kind: Any) -> Any:
    """Return an intrinsic that makes a pointer of an address."""

    @intrinsic
    def pointer(typing_context, address):  # type: ignore[no-untyped-def]
        def codegen(context, b, signature, args):
            return b.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), codegen

    return pointer


floats, raw, halves = (_pointer_to(kind) for kind in (types.float32, types.uint8, types.uint16))


@intrinsic
def now_ns(typing_context):  # type: ignore[no-untyped-def]
    """Read the monotonic clock."""

    def codegen(context, b, signature, args):
        read = cgutils.alloca_once(b, ir.ArrayType(I64, 2))  # struct timespec
        clock = ir.Constant(I32, _MONOTONIC)
        call(b, "clock_gettime", I32, [clock, b.bitcast(read, ir.IntType(8).as_pointer())])
        seconds, rest = (b.extract_value(b.load(read), part) for part in (0, 1))
        return b.add(b.mul(seconds, ir.Constant(I64, 1_000_000_000)), rest)

    return types.int64(), codegen


@kernel(inner=True)
def _enter(y, added, x, norm, norm_bias, eps, h):
    """Add the FFN of the layer before to the residual stream, and normalise the attention's input."""
    for b in range(x.shape[0]):
        for d in range(x.shape[1]):
            x[b, d] += y[b, d] + added[d] if added.shape[0] > 0 else y[b, d]
    norm_rows(x, norm, norm_bias, eps, h)


@kernel(inner=True)
def attention_share(
    at, sizes, eps, parallel_block, wqkv_mark, wo_mark, mark, width, cos, sin, cache_rows, positions, window, x,
    y, h, qkv, mixed, attended, inputs, stamps, counters, stage, helpers,
):  # fmt: skip
    """One thread's share of a layer's attention, from the FFN before it to the prepared input of its own."""
    num = x.shape[1]
    if take(counters, stage + _ENTER) == 0:
        stamps[0] = now_ns()
        _enter(
            y, carray(floats(at[ADDED]), (sizes.added,)), x, carray(floats(at[NORM]), (num,)),
            carray(floats(at[NORM_BIAS]), (sizes.norm_bias,)), eps, h,
        )  # fmt: skip
        prepare(h, wqkv_mark, width, inputs)
        finish(counters, stage + _ENTER)
    wait(counters, stage + _ENTER, 1)
    matrix = carray(raw(at[WQKV]), (sizes.qkv_rows, sizes.qkv_bytes))
    product_share(inputs, num, matrix, wqkv_mark, width, ROWS_PER_CHUNK, qkv, counters, stage + _QKV)
    cache = (sizes.cache_rows, sizes.kv_heads, sizes.positions, sizes.head_dim)
    mix_share(
        qkv, carray(floats(at[BQKV]), (sizes.bqkv,)), cos, sin, carray(floats(at[KEYS]), cache),
        carray(floats(at[VALUES]), cache), cache_rows, positions, window, mixed, counters, stage + _MIX, helpers,
    )  # fmt: skip
    if take(counters, stage + _PREPARE) == 0:
        prepare(mixed, wo_mark, width, inputs)
        finish(counters, stage + _PREPARE)
    wait(counters, stage + _PREPARE, 1)
    matrix = carray(raw(at[WO]), (sizes.out_rows, sizes.out_bytes))
    product_share(
        inputs, mixed.shape[1], matrix, wo_mark, width, ROWS_PER_CHUNK, attended, counters, stage + _OUT
    )
    if take(counters, stage + _MERGE) == 0:
        merge(
            x, attended, carray(floats(at[BO]), (sizes.bo,)), carray(floats(at[FFN_NORM]), (num,)),
            carray(floats(at[FFN_NORM_BIAS]), (sizes.norm_bias,)), eps, parallel_block, h,
        )  # fmt: skip
        prepare(h, mark, width, inputs)
        stamps[1] = now_ns()
        finish(counters, stage + _MERGE)
    wait(counters, stage + _MERGE, 1)


@kernel(inner=True)
def neurons_share(
    at, sizes, inputs, batch, num, gated, mark, width, down_mark, row_bytes, ids, chunk, rule, threshold, partials,
    slots, y, active, counters, stage, number,
):  # fmt: skip
    """One thread's share of a layer's listed neurons; returns when their sums are in y."""
    ffn_share(
        inputs, batch, num, carray(raw(at[RECORDS]), (sizes.neurons, sizes.record_bytes)), gated, mark, width,
        down_mark, row_bytes, carray(floats(at[BIASES]), (sizes.biased, sizes.biases)),
        carray(halves(at[SCALES]), (sizes.scales, sizes.columns)),
        carray(halves(at[MINIMA]), (sizes.minima, sizes.columns)), ids, chunk, rule, threshold, partials, slots, y,
        active, counters, stage, number,
    )  # fmt: skip
    wait(counters, stage + 1, batch * ((num + SLICE - 1) // SLICE))


@kernel(inner=True)
def _share(
    table, sizes, eps, parallel_block, wqkv_mark, wo_mark, gated, mark, width, down_mark, row_bytes, rule, thresholds,
    ids, chunk, cos, sin, cache_rows, positions, window, x, y, h, qkv, mixed, attended, inputs, partials, slots, fired,
    stamps, counters, helpers,
):  # fmt: skip
    """One thread's share of all layers."""
    number = take(counters, table.shape[0] * STAGES)
    for layer in range(table.shape[0]):
        at, stage = table[layer], layer * STAGES
        attention_share(
            at, sizes, eps, parallel_block, wqkv_mark, wo_mark, mark, width, cos, sin, cache_rows, positions, window, x,
            y, h, qkv, mixed, attended, inputs, stamps[layer], counters, stage, helpers,
        )  # fmt: skip
        neurons_share(
            at, sizes, inputs, x.shape[0], x.shape[1], gated, mark, width, down_mark, row_bytes, ids, chunk, rule,
            thresholds[layer], partials, slots, y, fired[layer], counters, stage + ATTENTION_STAGES, number,
        )  # fmt: skip


@kernel(parallel=True)
def layers(
    table, sizes, eps, parallel_block, wqkv_mark, wo_mark, gated, mark, width, down_mark, row_bytes, rule, thresholds,
    ids, chunk, cos, sin, cache_rows, positions, window, x, y, h, qkv, mixed, attended, inputs, partials, slots, fired,
    stamps, counters, helpers,
):  # fmt: skip
    clear(counters)
    for _ in prange(helpers):
        _share(
            table, sizes, eps, parallel_block, wqkv_mark, wo_mark, gated, mark, width, down_mark, row_bytes, rule,
            thresholds, ids, chunk, cos, sin, cache_rows, positions, window, x, y, h, qkv, mixed, attended, inputs,
            partials, slots, fired, stamps, counters, helpers,
        )  # fmt: skip
    stamps[table.shape[0], 0] = now_ns()
