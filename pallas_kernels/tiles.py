"""What the Pallas kernels share: tile sizes, and loads of scattered row tiles of every format as float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.block_rows import BLOCK, BlockRows, ColumnRows, Rows

try:
    from jax.experimental.pallas import triton as plt
except ImportError:  # deprecated: a JAX without it runs the jax-triton twins
    plt: Any = None

ANY = pl.BlockSpec(memory_space=pl.ANY)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Block sizes of a kernel.

    Attributes:
        block_k: slots a program handles at once (power of two).
        block_d: columns of a tile (power of two, at least 32).
        num_warps: warps of a program.
        num_stages: software pipeline depth of its loads.
        split: programs that share one column block (``gather_down``).
    """

    block_k: int = 16
    block_d: int = 256
    num_warps: int = 4
    num_stages: int = 2
    split: int = 8

    def compiler_params(self) -> Any:
        """Return Triton's parameters; without them pallas_call on CUDA takes Mosaic (Hopper only)."""
        return plt.CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages)


def block_columns(d: int, largest: int) -> int:
    """Return the largest power of two up to ``largest`` that divides ``d``, or 32 with a ragged tail."""
    return max(BLOCK, min(largest, d & -d))


def row_operands(name: str, rows: Rows | ColumnRows | None) -> dict[str, jax.Array | None]:
    """Return the kernel operands of ``rows``: itself, or codes, scales, minima and, for columns, their blocks."""
    if isinstance(rows, ColumnRows):
        tables = (rows.scales, rows.minima)
        views = (None if table is None else table.reshape(table.shape[0], -1, BLOCK) for table in tables)
        return dict(zip(_operands(name), (rows.codes, *views, rows.blocks), strict=True))
    if isinstance(rows, BlockRows):
        return dict(zip(_operands(name), (*rows, None), strict=True))
    return {name: rows}


def _operands(name: str) -> tuple[str, ...]:
    return name, f"{name}_scales", f"{name}_minima", f"{name}_blocks"


def in_blocks(dense: jax.Array, rows: Rows | ColumnRows) -> jax.Array:
    """View [..., D] as the kernels index it beside ``rows``: [..., D/32, 32] beside blocks (no copy)."""
    blocked = isinstance(rows, BlockRows | ColumnRows)
    return dense.reshape(*dense.shape[:-1], -1, BLOCK) if blocked else dense


@dataclass(frozen=True)
class RowTiles:
    """The rows of one operand inside a kernel, read in tiles of ``block_d`` columns.

    A tile comes in parts (4-bit codes: the low and the high halves of bytes), each with its own columns.
    """

    values_ref: Any
    scales_ref: Any
    minima_ref: Any
    blocks_ref: Any
    block_d: int

    @classmethod
    def of(cls, refs: dict[str, Any], name: str, block_d: int) -> RowTiles:
        """Collect what ``row_operands`` gave for ``name``."""
        values, scales, minima, blocks = (refs.get(operand) for operand in _operands(name))
        return cls(values, scales, minima, blocks, block_d)

    @property
    def num_tiles(self) -> int:
        """Tiles a row, the last one ragged where tiles do not divide it (dense rows only)."""
        return pl.cdiv(self.values_ref.shape[1], self.part_shape[0])

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of a part's columns."""
        if self.scales_ref is None:
            return (self.block_d,)
        return self.block_d // BLOCK, self.values_ref.shape[2]

    @property
    def num_parts(self) -> int:
        """Parts of a tile."""
        return 1 if self.scales_ref is None else BLOCK // self.values_ref.shape[2]

    def columns(self, tile: jax.Array, part: int) -> tuple[jax.Array, ...]:
        """Return the indices of a part's columns into an array viewed by ``in_blocks``."""
        first = tile * self.part_shape[0] + jnp.arange(self.part_shape[0], dtype=jnp.int32)
        if self.scales_ref is None:
            return (first,)
        width = self.part_shape[1]
        return first[:, None], (part * width + jnp.arange(width, dtype=jnp.int32))[None, :]

    def column_mask(self, tile: jax.Array) -> jax.Array | None:
        """Return the mask of a ragged last tile, or None where tiles divide the row (blocks always do)."""
        if self.values_ref.shape[1] % self.part_shape[0] == 0:
            return None
        return self.columns(tile, 0)[0] < self.values_ref.shape[1]

    def load(self, rows: jax.Array, needed: jax.Array, tile: jax.Array) -> tuple[jax.Array, ...]:
        """Load a tile of the given rows: float32 parts [K, *part_shape].

        Rows that are not needed cause no traffic and read 0.
        """
        shape = self.part_shape
        mask = _expand(needed, len(shape))
        col_mask = self.column_mask(tile)
        if col_mask is not None:
            mask = mask & col_mask[None]
        index = (_expand(rows, len(shape)), *(axis[None] for axis in self.columns(tile, 0)))
        values = plt.load(self.values_ref.at[index], mask=mask, other=0)
        if self.scales_ref is None:
            return (values.astype(jnp.float32),)
        if self.num_parts == 1:
            levels = [values.astype(jnp.float32)]
        else:
            codes, zero = values.astype(jnp.int32), 8 if self.minima_ref is None else 0
            levels = [(half - zero).astype(jnp.float32) for half in (codes & 15, codes >> 4)]
        group = rows if self.blocks_ref is None else plt.load(self.blocks_ref.at[rows], mask=needed, other=0)
        weights = [
            level * self._factors(self.scales_ref, group, needed, tile, part)
            for part, level in enumerate(levels)
        ]
        if self.minima_ref is not None:
            least = (
                self._factors(self.minima_ref, group, needed, tile, part) for part in range(len(weights))
            )
            weights = [weight + minimum for weight, minimum in zip(weights, least, strict=True)]
        return tuple(weights)

    def _factors(self, ref, group: jax.Array, needed: jax.Array, tile: jax.Array, part: int) -> jax.Array:
        """Load the scales (or minima) of a part: one for each block, or one for each column where shared."""
        blocks, *within = self.columns(tile, part)
        if self.blocks_ref is None:
            values = plt.load(ref.at[group[:, None], blocks[None, :, 0]], mask=needed[:, None], other=0)
            return values.astype(jnp.float32)[:, :, None]  # beside each code it would be loaded code by code
        index = (_expand(group, 2), blocks[None], *(axis[None] for axis in within))
        return plt.load(ref.at[index], mask=_expand(needed, 2), other=0).astype(jnp.float32)


def load_columns(ref, b: int, columns: tuple[jax.Array, ...], mask: jax.Array | None) -> jax.Array:
    """Load the columns of batch row ``b`` as float32, 0 where masked."""
    view = ref.at[(b, *columns)]
    loaded = plt.load(view) if mask is None else plt.load(view, mask=mask, other=0)
    return loaded.astype(jnp.float32)


def sum_columns(tile: jax.Array) -> jax.Array:
    """Sum all axes but the first, one at a time (Triton reduces one axis)."""
    while tile.ndim > 1:
        tile = jnp.sum(tile, axis=tile.ndim - 1)
    return tile


def any_true(mask: jax.Array) -> jax.Array:
    """Return int32 1 where any element holds, else 0: a factor of trip counts (a select lowers to bad IR)."""
    return jnp.max(mask.astype(jnp.int32))


def _expand(vector: jax.Array, axes: int) -> jax.Array:
    """Append ``axes`` axes of size 1."""
    return vector[(slice(None), *(None,) * axes)]
