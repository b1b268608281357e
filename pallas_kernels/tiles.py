"""Tile sizes of the Pallas kernels, and the masked row load that they share."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Block sizes of a kernel.

    Attributes:
        block_k: slots a program handles at once (power of two).
        block_d: columns of a tile (power of two).
        num_warps: warps of a program.
        num_stages: software pipeline depth of its loads.
        split: programs that share one column block (``gather_down``).
    """

    block_k: int = 16
    block_d: int = 256
    num_warps: int = 4
    num_stages: int = 2
    split: int = 8

    def compiler_params(self) -> plt.CompilerParams:
        """Return Triton's parameters; without them pallas_call on CUDA takes Mosaic (Hopper only)."""
        return plt.CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages)


def block_columns(d: int, largest: int) -> int:
    """Return the largest power of two up to ``largest`` that divides ``d``, or 32 with a ragged tail."""
    return max(32, min(largest, d & -d))


def column_mask(cols: jax.Array, d: int, block_d: int) -> jax.Array | None:
    """Return the mask of a ragged last tile, or None where tiles divide ``d``."""
    return None if d % block_d == 0 else cols < d


def load_vector(ref, b: int, cols: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Load columns of row ``b`` of a 2-D ref as float32, 0 where masked."""
    view = ref.at[b, cols]
    loaded = plt.load(view) if mask is None else plt.load(view, mask=mask, other=0)
    return loaded.astype(jnp.float32)


def load_rows(
    ref, rows: jax.Array, cols: jax.Array, live: jax.Array, col_mask: jax.Array | None
) -> jax.Array:
    """Load a [K, D] tile of scattered rows as float32; rows that are not live cause no traffic and read 0."""
    mask = live[:, None] if col_mask is None else live[:, None] & col_mask[None, :]
    return plt.load(ref.at[rows[:, None], cols[None, :]], mask=mask, other=0).astype(jnp.float32)


def any_true(mask: jax.Array) -> jax.Array:
    """Return int32 1 where any element holds, else 0: a factor of trip counts (a select lowers to bad IR)."""
    return jnp.max(mask.astype(jnp.int32))


ANY = pl.BlockSpec(memory_space=pl.ANY)
