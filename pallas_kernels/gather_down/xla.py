"""``gather_down`` in plain XLA: a product over the gathered rows, or over all slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.block_rows import ColumnRows, Rows, take_rows
from pallas_kernels.slots import live_slots


def gather_down(
    values: jax.Array,
    down: Rows | ColumnRows,
    *,
    slots: jax.Array | None,
    n: jax.Array | None,
    valid: jax.Array | None,
) -> jax.Array:
    """Return float32 [B, D]; arguments as in ``api.gather_down``, checked there.

    Measured on a 2-core CPU, C=512, D=576, float32, B=1: ``values @ down`` takes 105 us where a plain sum of
    the same bytes takes 40, because XLA's CPU backend runs a lone GEMV on one thread (gate and up run side by
    side). Splitting it makes it worse: slices of rows or columns are copied (400 us), a batched product over
    row blocks 120 us, ``down.T @ values`` 450 us, a multiply-reduce 270 us. Whole FFN: 200-240 us, about half
    of the 31 GB/s bound.
    """
    if slots is None or n is None:
        live, rows = valid, take_rows(down, None)
    else:
        live = live_slots(slots, n, down.shape[0])
        rows = take_rows(down, jnp.where(live, slots, 0))  # [K, D]
    assert live is not None  # the api has checked the selection
    weights = jnp.where(live[None, :], values.astype(jnp.float32), 0.0)
    return jnp.dot(weights, rows, precision=jax.lax.Precision.HIGHEST)
