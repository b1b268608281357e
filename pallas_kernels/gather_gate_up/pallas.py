"""``gather_gate_up`` as one Pallas-Triton kernel: reads the rows of active slots, and nothing else.

Padding, holes and, for rules that the first product decides, the up rows of inactive slots cause no traffic.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import tiles as t
from pallas_kernels.block_rows import Rows, row_format
from pallas_kernels.rules import first_is_active, rule_value
from pallas_kernels.slots import as_list
from pallas_kernels.tiles import plt


def gather_gate_up(
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
    interpret: bool = False,
    tiles: t.Tiles | None = None,
) -> jax.Array:
    """Return float32 [B, K]; arguments as in ``api.gather_gate_up``, checked there."""
    tiles = tiles or default_tiles(x.shape[0], up)
    slots, n = as_list(slots, n, valid)
    gate_bias, up_bias = (None, None) if biases is None else biases
    operands = {
        "x": t.in_blocks(x, up),
        **t.row_operands("gate", gate),
        **t.row_operands("up", up),
        "gate_bias": gate_bias,
        "up_bias": up_bias,
        "slots": slots,
        "n": n.reshape(1),
        "threshold": threshold.reshape(1),
    }
    names = tuple(name for name, operand in operands.items() if operand is not None)
    kernel = functools.partial(
        _kernel,
        names=names,
        rule=rule,
        block_k=tiles.block_k,
        block_d=t.block_columns(x.shape[1], tiles.block_d),
    )
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(slots.shape[0], tiles.block_k),),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], slots.shape[0]), jnp.float32),
        in_specs=[t.ANY] * len(names),
        out_specs=t.ANY,
        compiler_params=None if interpret else tiles.compiler_params(),
        interpret=interpret,
        name=f"gather_gate_up_{rule}",
    )(*(operands[name] for name in names))


def default_tiles(batch: int, rows: Rows) -> t.Tiles:
    """Return tiles that compile without spills (see the compile report): eight sums want small ones.

    Not of q8_0: its eight sums keep 8 bytes on the stack with 128 columns (sm_86), and none with 256.
    """
    return t.Tiles(block_d=128 if batch > 4 and row_format(rows) != "q8_0" else 256)


def _kernel(*refs, names: tuple[str, ...], rule: str, block_k: int, block_d: int) -> None:
    ref = dict(zip(names, refs[:-1], strict=True))
    out_ref = refs[-1]
    batch, num_listed = out_ref.shape
    position = pl.program_id(0) * block_k + jnp.arange(block_k, dtype=jnp.int32)  # [block_k]
    listed = position < jnp.minimum(ref["n"][0], num_listed)
    rows = plt.load(ref["slots"].at[position], mask=listed, other=-1)
    live = (rows >= 0) & (rows < ref["up"].shape[0])
    rows = jnp.where(live, rows, 0)
    threshold = ref["threshold"][0]

    def products(name: str, needed: jax.Array) -> tuple[jax.Array, ...]:
        row_tiles = t.RowTiles.of(ref, name, block_d)
        sums = _dots(ref["x"], row_tiles, rows, needed)
        if f"{name}_bias" not in ref:
            return sums
        bias = plt.load(ref[f"{name}_bias"].at[rows], mask=needed, other=0).astype(jnp.float32)
        return tuple(total + bias for total in sums)

    if "gate" in ref:
        gates: tuple[jax.Array | None, ...] = products("gate", live)
        needed = _any_row_active(rule, gates, threshold, live)
    else:
        gates, needed = (None,) * batch, live
    ups = products("up", needed)
    for b in range(batch):
        value = jnp.where(live, rule_value(rule, gates[b], ups[b], threshold), 0.0)
        plt.store(out_ref.at[b, position], value, mask=position < num_listed)


def _any_row_active(rule, gates, threshold: jax.Array, live: jax.Array) -> jax.Array:
    """Mask the slots that are active in at least one row of the batch; the rest needs no up product."""
    active = [first_is_active(rule, gate, threshold) for gate in gates]
    decided = [mask for mask in active if mask is not None]
    return live & functools.reduce(jnp.logical_or, decided) if decided else live


def _dots(x_ref, w: t.RowTiles, rows: jax.Array, needed: jax.Array) -> tuple[jax.Array, ...]:
    """Return, for each row of x, the products with the needed rows of w (block_k each, 0 for the others)."""

    def body(i, sums):
        mask = w.column_mask(i)
        for part, weights in enumerate(w.load(rows, needed, i)):  # [block_k, ...]
            xs = [t.load_columns(x_ref, b, w.columns(i, part), mask) for b in range(len(sums))]
            sums = tuple(total + t.sum_columns(weights * x[None]) for total, x in zip(sums, xs, strict=True))
        return sums

    trips = t.any_true(needed) * w.num_tiles  # a block without work costs no traffic
    return jax.lax.fori_loop(0, trips, body, (jnp.zeros(rows.shape, jnp.float32),) * x_ref.shape[0])
