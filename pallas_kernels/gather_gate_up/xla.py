"""``gather_gate_up`` in plain XLA: a gather and a product, or the product over all slots and a mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.block_rows import Rows, take_rows
from pallas_kernels.rules import rule_value
from pallas_kernels.slots import dot_rows, live_slots


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
) -> jax.Array:
    """Return float32 [B, K]; arguments as in ``api.gather_gate_up``, checked there.

    Measured on a 2-core CPU, C=512, D=576, float32, B=1, one pass over 30 layers of distinct rows (31 GB/s
    for a plain sum): gate and up as ``dot_general`` over both last axes run at 21 GB/s, side by side on two
    threads; ``W @ x.T`` is 25 % slower and a multiply-reduce three times slower. A gather of K rows costs as
    much as all C rows at K = C / 3.
    """
    if slots is None or n is None:
        live, pick = valid, None
    else:
        live = live_slots(slots, n, up.shape[0])
        pick = jnp.where(live, slots, 0)

    def products(rows: Rows, bias: jax.Array | None) -> jax.Array:
        out = dot_rows(x, take_rows(rows, pick))  # [B, K]
        if bias is None:
            return out
        bias = bias if pick is None else bias.at[pick].get(mode="promise_in_bounds")
        return out + bias.astype(jnp.float32)[None, :]

    gate_bias, up_bias = (None, None) if biases is None else biases
    gate_products = None if gate is None else products(gate, gate_bias)
    values = rule_value(rule, gate_products, products(up, up_bias), threshold)
    assert live is not None  # the api has checked the selection
    return jnp.where(live[None, :], values, 0.0)
