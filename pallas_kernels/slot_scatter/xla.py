"""``slot_scatter`` in plain XLA: one scatter of whole rows for each array."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def slot_scatter(cache: tuple[jax.Array, ...], staging: jax.Array, slots: jax.Array) -> tuple[jax.Array, ...]:
    """Return the updated cache; arguments as in ``api.slot_scatter``, checked there."""
    num_slots, num_rows = cache[0].shape[0], slots.shape[0]
    # jnp wraps negative indices, and unique_indices promises that padding rows differ too.
    spare = num_slots + jnp.arange(num_rows, dtype=jnp.int32)
    target = jnp.where((slots >= 0) & (slots < num_slots), slots, spare)
    return tuple(
        rows.at[target].set(staging[:, r], mode="drop", unique_indices=True) for r, rows in enumerate(cache)
    )
