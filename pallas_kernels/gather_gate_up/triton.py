"""``gather_gate_up`` as a Triton kernel through jax-triton: the twin of ``pallas.py``, same maths and tiles.

Pallas' Triton backend is deprecated from jax 0.11 on; this is the way that remains for GPUs before Hopper.
"""

# The kernels are Triton's language, which pyright reads as Python.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels import tiles as t
from pallas_kernels.block_rows import BlockRows, Rows
from pallas_kernels.gather_gate_up.pallas import default_tiles
from pallas_kernels.slots import as_list
from pallas_kernels.triton_rows import Launch, columns, load_tile, operands, row_constants, sum_columns


def gather_gate_up(*args: Any, **options: Any) -> jax.Array:
    """Return float32 [B, K]; arguments as in ``launch``."""
    return launch(*args, **options).run()


def launch(
    x: jax.Array,
    gate: Rows | None,
    up: Rows,
    *,
    slots: jax.Array | None,
    n: jax.Array | None,
    valid: jax.Array | None,
    rule: str,
    threshold: jax.Array,
    biases: tuple[jax.Array | None, jax.Array] | None,
    tiles: t.Tiles | None = None,
) -> Launch:
    """Prepare the kernel; arguments as in ``api.gather_gate_up``, checked there."""
    tiles = tiles or twin_tiles(x.shape[0], up)
    slots, n = as_list(slots, n, valid)
    batch, num_listed = x.shape[0], slots.shape[0]
    gate_bias, up_bias = (None, None) if biases is None else biases
    # Where an operand is missing its place is taken by another pointer, which the kernel then does not read.
    arrays = (
        x,
        *operands(up if gate is None else gate),
        *operands(up),
        x if gate_bias is None else gate_bias,
        x if up_bias is None else up_bias,
        slots,
        n.reshape(1),
        threshold.reshape(1),
    )
    constants = row_constants(up, tiles) | {
        "BATCH": batch,
        "NUM_LISTED": num_listed,
        "RULE": rule,
        "GATED": gate is not None,
        "BIASED": biases is not None,
    }
    out = jax.ShapeDtypeStruct((batch, num_listed), jnp.float32)
    grid = (-(-num_listed // tiles.block_k),)
    return Launch(
        kernel=gather_gate_up_kernel, arrays=arrays, out=out, grid=grid, tiles=tiles, constants=constants
    )


def twin_tiles(batch: int, up: Rows) -> t.Tiles:
    """Return ``pallas.default_tiles``, but narrower ones for float32: wide ones spill here at batch 2 on sm_90."""
    wide = batch > 1 and not isinstance(up, BlockRows) and up.dtype == jnp.float32
    return t.Tiles(block_d=128) if wide else default_tiles(batch, up)


@triton.jit
def gather_gate_up_kernel(
    x, gate, gate_scales, gate_minima, up, up_scales, up_minima, gate_bias, up_bias, slots, n, threshold, out,
    BATCH: tl.constexpr, NUM_LISTED: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    RULE: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_K entries of the list: gate products, then up products of slots that can be active."""
    position = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    listed = position < tl.minimum(tl.load(n), NUM_LISTED)
    rows = tl.load(slots + position, mask=listed, other=-1)
    live = (rows >= 0) & (rows < C)
    rows = tl.where(live, rows, 0)
    limit = tl.load(threshold)  # 0 for rules without one
    needed = live
    if GATED:
        gates = _products(
            x, gate, gate_scales, gate_minima, gate_bias, rows, live, BATCH, D, BIASED, FORMAT, BLOCK_D
        )
        if RULE != "silu":
            active = gates[0] > limit
            for b in tl.static_range(1, BATCH):
                active = active | (gates[b] > limit)
            needed = live & active
    ups = _products(x, up, up_scales, up_minima, up_bias, rows, needed, BATCH, D, BIASED, FORMAT, BLOCK_D)
    for b in tl.static_range(BATCH):
        if GATED:
            value = _value(gates[b], ups[b], limit, RULE, GATED)
        else:
            value = _value(ups[b], ups[b], limit, RULE, GATED)
        value = tl.where(live, value, 0.0)
        tl.store(out + b * NUM_LISTED + position, value, mask=position < NUM_LISTED)


@triton.jit
def _products(
    x, w, scales, minima, bias, rows, needed,
    BATCH: tl.constexpr, D: tl.constexpr, BIASED: tl.constexpr, FORMAT: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return, for each row of x, the products with the needed rows of w: a tuple of [K], 0 for the others."""
    sums = ()
    for _ in tl.static_range(BATCH):
        sums = sums + (tl.zeros([rows.shape[0]], tl.float32),)
    # A block without work makes no trip and causes no traffic.
    trips = tl.max(needed.to(tl.int32), axis=0) * ((D + BLOCK_D - 1) // BLOCK_D)
    for tile in range(trips):
        parts = load_tile(w, scales, minima, rows, rows, needed, tile, D, FORMAT, False, BLOCK_D)
        for part in tl.static_range(len(parts)):
            cols = columns(tile, part, FORMAT, BLOCK_D)
            added = ()
            for b in tl.static_range(BATCH):
                xs = tl.load(x + b * D + cols, mask=cols < D, other=0).to(tl.float32)
                added = added + (sums[b] + sum_columns(parts[part] * xs[None]),)
            sums = added
    if BIASED:
        offset = tl.load(bias + rows, mask=needed, other=0).to(tl.float32)
        shifted = ()
        for b in tl.static_range(BATCH):
            shifted = shifted + (sums[b] + offset,)
        sums = shifted
    return sums


@triton.jit
def _value(first, up, threshold, RULE: tl.constexpr, GATED: tl.constexpr):
    """Return the value of each neuron; ``rules.rule_value`` in Triton."""
    if RULE == "silu":
        value = first / (1.0 + tl.exp(-first))
    elif RULE == "relu2":
        value = first * first
    else:
        value = first
    if GATED:
        if RULE == "drelu":
            value = value * tl.maximum(up, 0.0)
        else:
            value = value * up
    if RULE == "silu":
        size = tl.abs(value)
        part = tl.minimum(size, 3.0 * (size - threshold))
        value = tl.where(size > threshold, tl.where(value < 0, -part, part), 0.0)
    else:
        value = tl.where(first > threshold, value, 0.0)
    return value
