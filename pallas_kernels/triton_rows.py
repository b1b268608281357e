"""What the Triton twins share: row tiles of every format as float32, and the call through jax-triton.

Import this module only where the ``triton`` package is installed; ``implementations.load_twin`` says how to get it.
"""

# The kernels are Triton's language, which pyright reads as Python.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels import tiles as t
from pallas_kernels.block_rows import BLOCK, BlockRows, ColumnRows, Rows, row_format


def operands(rows: Rows | ColumnRows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the pointers of rows: values, scales and minima; where one is missing another takes its place."""
    if not isinstance(rows, BlockRows | ColumnRows):
        return rows, rows, rows
    return rows.codes, rows.scales, rows.scales if rows.minima is None else rows.minima


def row_constants(rows: Rows | ColumnRows, tiles: t.Tiles) -> dict[str, Any]:
    """Return the compile-time facts of a kernel over rows [C, D].

    Raises:
        ValueError: more weights than 32-bit offsets reach.
    """
    if rows.shape[0] * rows.shape[1] >= 2**31:
        raise ValueError(
            f"rows {rows.shape} hold 2^31 weights or more: the kernel's offsets have 32 bits, use 'xla'"
        )
    quantised = isinstance(rows, BlockRows | ColumnRows)
    return {
        "C": rows.shape[0],
        "D": rows.shape[1],
        "FORMAT": row_format(rows).removesuffix("_column") if quantised else "dense",
        "BLOCK_K": tiles.block_k,
        "BLOCK_D": t.block_columns(rows.shape[1], tiles.block_d),
    }


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel and all that it is launched with.

    Attributes:
        kernel: its parameters are pointers to ``arrays``, a pointer to the output, and ``constants`` by name.
        arrays: the operands.
        out: shape and dtype of the output.
        grid: number of programs along each axis.
        tiles: warps and pipeline stages.
        constants: compile-time values.
    """

    kernel: Any
    arrays: tuple[jax.Array, ...]
    out: jax.ShapeDtypeStruct
    grid: tuple[int, ...]
    tiles: t.Tiles
    constants: Mapping[str, Any]

    def run(self) -> jax.Array:
        """Launch it through jax-triton."""
        import jax_triton  # pyright: ignore[reportMissingImports]

        _mend_dead_code_rule()
        # 0.4 renamed the argument.
        parameters = inspect.signature(jax_triton.triton_call).parameters
        out = {"out_type" if "out_type" in parameters else "out_shape": self.out}
        options = {"num_warps": self.tiles.num_warps, "num_stages": self.tiles.num_stages}
        return jax_triton.triton_call(
            *self.arrays, kernel=self.kernel, grid=self.grid, **out, **options, **self.constants
        )


def _mend_dead_code_rule() -> None:
    """Give jax-triton's primitive a rule that this JAX can call.

    jax 0.12 calls dead code rules with three arguments; jax-triton 0.4.1 registers one of two, and any jit fails.
    """
    from jax.interpreters import partial_eval

    rules: dict[Any, Any] = partial_eval.dce_rules
    for primitive, rule in list(rules.items()):
        if primitive.name != "triton_kernel_call" or jax.__version_info__ < (0, 12):
            continue
        if len(inspect.signature(rule).parameters) == 2:
            rules[primitive] = lambda used, live, equation: ([True] * len(equation.invars), equation)


PER_BLOCK = tl.constexpr(BLOCK)  # weights a block of quantised rows


@triton.jit
def columns(tile, part: tl.constexpr, FORMAT: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the columns of a tile's part: [BLOCK_D], or [blocks, codes] (4 bits: the low or the high halves)."""
    if FORMAT == "dense":
        cols = tile * BLOCK_D + tl.arange(0, BLOCK_D)
    else:
        width: tl.constexpr = PER_BLOCK if FORMAT == "q8_0" else PER_BLOCK // 2
        blocks = tile * (BLOCK_D // PER_BLOCK) + tl.arange(0, BLOCK_D // PER_BLOCK)
        within = tl.arange(0, width) + part * width
        cols = blocks[:, None] * PER_BLOCK + within[None, :]
    return cols


@triton.jit
def load_tile(
    values, scales, minima, groups, rows, needed, tile,
    D: tl.constexpr, FORMAT: tl.constexpr, SHARED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load a tile of the rows as float32: a tuple of parts [K, columns...]; rows that are not needed read 0.

    SHARED: scales and minima are tables [G, D], and ``groups`` says which row of them belongs to each of the rows.
    """
    if FORMAT == "dense":
        cols = columns(tile, 0, FORMAT, BLOCK_D)
        mask = needed[:, None] & (cols < D)[None, :]
        loaded = tl.load(values + rows[:, None] * D + cols[None, :], mask=mask, other=0)
        parts = (loaded.to(tl.float32),)
    else:
        width: tl.constexpr = PER_BLOCK if FORMAT == "q8_0" else PER_BLOCK // 2
        num_blocks: tl.constexpr = D // PER_BLOCK
        blocks = tile * (BLOCK_D // PER_BLOCK) + tl.arange(0, BLOCK_D // PER_BLOCK)
        inner = blocks[:, None] * width + tl.arange(0, width)[None, :]
        at = rows[:, None, None] * (num_blocks * width) + inner[None, :, :]
        codes = tl.load(values + at, mask=needed[:, None, None], other=0)
        if FORMAT == "q8_0":
            scale = _factors(scales, groups, needed, tile, 0, D, FORMAT, SHARED, BLOCK_D)
            parts = (codes.to(tl.float32) * scale,)
        else:
            wide = codes.to(tl.int32)
            zero: tl.constexpr = 8 if FORMAT == "q4_0" else 0
            low, high = ((wide & 15) - zero).to(tl.float32), ((wide >> 4) - zero).to(tl.float32)
            low = low * _factors(scales, groups, needed, tile, 0, D, FORMAT, SHARED, BLOCK_D)
            high = high * _factors(scales, groups, needed, tile, 1, D, FORMAT, SHARED, BLOCK_D)
            if FORMAT == "q4_1":
                low = low + _factors(minima, groups, needed, tile, 0, D, FORMAT, SHARED, BLOCK_D)
                high = high + _factors(minima, groups, needed, tile, 1, D, FORMAT, SHARED, BLOCK_D)
            parts = (low, high)
    return parts


@triton.jit
def _factors(
    table, groups, needed, tile, part: tl.constexpr,
    D: tl.constexpr, FORMAT: tl.constexpr, SHARED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load the scales or minima of a part: one for each block of a row, or one for each column where shared."""
    if SHARED:
        cols = columns(tile, part, FORMAT, BLOCK_D)
        at = groups[:, None, None] * D + cols[None, :, :]
        factors = tl.load(table + at, mask=needed[:, None, None], other=0).to(tl.float32)
    else:
        blocks = tile * (BLOCK_D // PER_BLOCK) + tl.arange(0, BLOCK_D // PER_BLOCK)
        at = groups[:, None] * (D // PER_BLOCK) + blocks[None, :]
        loaded = tl.load(table + at, mask=needed[:, None], other=0).to(tl.float32)
        factors = tl.expand_dims(loaded, 2)  # beside each code it would be loaded code by code
    return factors


@triton.jit
def sum_columns(tile):
    """Sum all axes but the first."""
    if len(tile.shape) == 3:
        sums = tl.sum(tl.sum(tile, axis=2), axis=1)
    else:
        sums = tl.sum(tile, axis=1)
    return sums
