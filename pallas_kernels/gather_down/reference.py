"""``gather_down`` in plain jnp float32: what every implementation must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def gather_down_reference(values: jax.Array, down: jax.Array, slots: jax.Array, n: jax.Array) -> jax.Array:
    """Return float32 [B, D], the sum over k < n of values[:, k] * down[slots[k]].

    Args:
        values: float32 [B, K].
        down: [C, D].
        slots: int32 [K], all inside 0..C-1.
        n: int32 scalar.
    """
    listed = jnp.broadcast_to(jnp.arange(slots.shape[0]) < n, values.shape)
    weights = jnp.where(listed, values, 0.0)
    return jnp.einsum(
        "bk,kd->bd", weights, jnp.take(down, slots, axis=0).astype(jnp.float32), precision="highest"
    )
