"""The two ways to say which slots an operation evaluates, checked and normalised."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def check_selection(slots: object, n: object, valid: object) -> None:
    """Raise unless exactly one of a list (``slots`` and ``n``) and a mask (``valid``) is given.

    Raises:
        ValueError: both, neither, or half of a form.
    """
    listed = slots is not None and n is not None and valid is None
    masked = slots is None and n is None and valid is not None
    if not (listed or masked):
        given = ", ".join(
            name for name, arg in (("slots", slots), ("n", n), ("valid", valid)) if arg is not None
        )
        raise ValueError(
            f"pass slots and n (a list), or slots=None, n=None and valid (a mask), not ({given})"
        )


def live_slots(slots: Int32[Array, " K"], n: Int32[Array, ""], num_slots: int) -> Bool[Array, " K"]:
    """Tell which entries of a list count: the first n, and of those the ones inside the cache."""
    position = jnp.arange(slots.shape[0], dtype=jnp.int32)
    return (position < n) & (slots >= 0) & (slots < num_slots)


def as_list(
    slots: Int32[Array, " K"] | None, n: Int32[Array, ""] | None, valid: Bool[Array, " C"] | None
) -> tuple[Int32[Array, " K"], Int32[Array, ""]]:
    """Turn either form into a list; a masked-out slot becomes a hole (-1), which kernels skip."""
    if slots is None or n is None:
        assert valid is not None  # check_selection has run
        positions = jnp.arange(valid.shape[0], dtype=jnp.int32)
        return jnp.where(valid, positions, -1), jnp.asarray(valid.shape[0], jnp.int32)
    return slots.astype(jnp.int32), jnp.asarray(n, jnp.int32)


def dot_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Return x @ rows.T in float32: [B, D] and [K, D] give [B, K].

    Both contract their last axis, so that XLA's CPU backend runs one GEMV over contiguous rows.
    """
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x.astype(jnp.float32), rows, dims, precision=jax.lax.Precision.HIGHEST)
