"""``slot_scatter`` without a scatter: for each slot, the staged row that names it, else the old row."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def slot_scatter_reference(
    cache: tuple[jax.Array, ...], staging: jax.Array, slots: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the updated cache.

    Args:
        cache: R arrays [C, D].
        staging: [M, R, D].
        slots: int32 [M]; rows outside 0..C-1 match no slot.
    """
    names = jnp.arange(cache[0].shape[0])[:, None] == slots[None, :]  # [C, M]
    written, source = names.any(axis=1), names.argmax(axis=1)
    return tuple(
        jnp.where(
            jnp.broadcast_to(written[:, None], rows.shape), jnp.take(staging[:, r], source, axis=0), rows
        )
        for r, rows in enumerate(cache)
    )
