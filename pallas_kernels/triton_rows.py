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
from pallas_kernels.block_rows import BLOCK, BlockRows, Rows, row_format


def operands(rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Return the pointers of rows: values and scales; dense rows have none, and pass their values twice."""
    return (rows.codes, rows.scales) if isinstance(rows, BlockRows) else (rows, rows)


def row_constants(rows: Rows, tiles: t.Tiles) -> dict[str, Any]:
    """Return the compile-time facts of a kernel over rows [C, D].

    Raises:
        ValueError: more weights than 32-bit offsets reach.
    """
    if rows.shape[0] * rows.shape[1] >= 2**31:
        raise ValueError(
            f"rows {rows.shape} hold 2^31 weights or more: the kernel's offsets have 32 bits, use 'xla'"
        )
    quantised = isinstance(rows, BlockRows)
    return {
        "C": rows.shape[0],
        "D": rows.shape[1],
        "FORMAT": row_format(rows) if quantised else "dense",
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
    """Return the columns of a tile's part: [BLOCK_D], or [blocks, codes] (q4_0: the low or the high halves)."""
    if FORMAT == "dense":
        cols = tile * BLOCK_D + tl.arange(0, BLOCK_D)
    else:
        width: tl.constexpr = PER_BLOCK // 2 if FORMAT == "q4_0" else PER_BLOCK
        blocks = tile * (BLOCK_D // PER_BLOCK) + tl.arange(0, BLOCK_D // PER_BLOCK)
        within = tl.arange(0, width) + part * width
        cols = blocks[:, None] * PER_BLOCK + within[None, :]
    return cols


@triton.jit
def load_tile(
    values, scales, rows, needed, tile, D: tl.constexpr, FORMAT: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load a tile of the rows as float32: a tuple of parts [K, columns...]; rows that are not needed read 0."""
    if FORMAT == "dense":
        cols = columns(tile, 0, FORMAT, BLOCK_D)
        mask = needed[:, None] & (cols < D)[None, :]
        loaded = tl.load(values + rows[:, None] * D + cols[None, :], mask=mask, other=0)
        parts = (loaded.to(tl.float32),)
    else:
        width: tl.constexpr = PER_BLOCK // 2 if FORMAT == "q4_0" else PER_BLOCK
        num_blocks: tl.constexpr = D // PER_BLOCK
        blocks = tile * (BLOCK_D // PER_BLOCK) + tl.arange(0, BLOCK_D // PER_BLOCK)
        at = rows[:, None] * num_blocks + blocks[None, :]
        loaded = tl.load(scales + at, mask=needed[:, None], other=0).to(tl.float32)
        scale = tl.expand_dims(loaded, 2)  # beside each code it would be loaded code by code
        within = tl.arange(0, width)
        inner = blocks[:, None] * width + within[None, :]
        at = rows[:, None, None] * (num_blocks * width) + inner[None, :, :]
        codes = tl.load(values + at, mask=needed[:, None, None], other=0)
        if FORMAT == "q8_0":
            parts = (codes.to(tl.float32) * scale,)
        else:
            wide = codes.to(tl.int32)
            low = ((wide & 15) - 8).to(tl.float32) * scale
            parts = (low, ((wide >> 4) - 8).to(tl.float32) * scale)
    return parts


@triton.jit
def sum_columns(tile):
    """Sum all axes but the first."""
    if len(tile.shape) == 3:
        sums = tl.sum(tl.sum(tile, axis=2), axis=1)
    else:
        sums = tl.sum(tile, axis=1)
    return sums
