"""The jax-triton twins as sources for ``triton.compile``: same kernel functions and constants as a call takes."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import ColumnRows, empty_codes, empty_rows
from pallas_kernels.block_rows import FORMATS as BLOCKED
from pallas_kernels.shapes import LLAMA_7B

NUM_SLOTS, NUM_LISTED = 4096, 2048
COLUMNS = tuple(f"{name}_column" for name in BLOCKED)
_POINTERS = {"float32": "fp32", "int32": "i32", "bfloat16": "bf16", "float16": "fp16", "int8": "i8"}
_POINTERS["uint8"] = "u8"

# (rows, batch) -> operation folder and a function from traced arguments to its launch, with their shapes
Case = tuple[str, Callable[..., Any], tuple[Any, ...]]


def _gate_up(rule: str) -> Callable[[Any, int], Case]:
    def case(rows: Any, batch: int) -> Case:
        def launch(twin: Any, x: Any, gate: Any, up: Any, slots: Any, n: Any, threshold: Any) -> Any:
            return twin.launch(
                x, gate, up, slots=slots, n=n, valid=None, rule=rule, threshold=threshold, biases=None
            )

        return "gather_gate_up", launch, (shape(batch, LLAMA_7B.d), rows, rows, *listed(), shape())

    return case


def _down(rows: Any, batch: int) -> Case:
    def launch(twin: Any, values: Any, down: Any, slots: Any, n: Any) -> Any:
        return twin.launch(values, down, slots=slots, n=n, valid=None)

    return "gather_down", launch, (shape(batch, NUM_LISTED), rows, *listed())


TWINS: dict[str, Callable[[Any, int], Case]] = {
    "twin_gather_gate_up_silu": _gate_up("silu"),
    "twin_gather_gate_up_relu": _gate_up("relu"),
    "twin_gather_down": _down,
}


@dataclass(frozen=True)
class TwinSource:
    """A twin's kernel with the types and constants of a launch."""

    source: Any
    options: dict[str, int]

    def opened(self) -> contextlib.AbstractContextManager[Any]:
        """Give the source itself; nothing has to be written."""
        return contextlib.nullcontext(self.source)


def twin_source(make: Callable[[Any, int], Case], dtype: str, batch: int) -> TwinSource:
    """Trace a launch at 7B width and return its kernel for ``triton.compile``."""
    op, launch_of, arguments = make(rows_of(dtype), batch)
    twin = importlib.import_module(f"pallas_kernels.{op}.triton")
    sources: list[TwinSource] = []

    def record(*traced: Any) -> None:
        sources.append(_source(launch_of(twin, *traced)))

    jax.eval_shape(record, *arguments)
    return sources[0]


def _source(launch: Any) -> TwinSource:
    names = [parameter.name for parameter in launch.kernel.params]
    pointers = [*launch.arrays, launch.out]
    count = len(pointers)
    signature = {name: f"*{_POINTERS[a.dtype.name]}" for name, a in zip(names[:count], pointers, strict=True)}
    signature |= dict.fromkeys(names[count:], "constexpr")
    constants = {(at,): launch.constants[name] for at, name in enumerate(names) if at >= count}
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(count)}  # as XLA allocates
    source = importlib.import_module("triton.compiler").ASTSource(
        launch.kernel, signature, constants, aligned
    )
    return TwinSource(source, {"num_warps": launch.tiles.num_warps, "num_stages": launch.tiles.num_stages})


def rows_of(dtype: str) -> Any:
    """Return the shapes of slot rows in a format."""
    if dtype in COLUMNS:
        return jax.eval_shape(lambda: _columns(dtype.removesuffix("_column")))
    if dtype in BLOCKED:
        return jax.eval_shape(lambda: empty_rows(NUM_SLOTS, LLAMA_7B.d, dtype))
    return jax.ShapeDtypeStruct((NUM_SLOTS, LLAMA_7B.d), dtype)


def _columns(fmt: str) -> ColumnRows:
    table = jnp.zeros((LLAMA_7B.f // 32, LLAMA_7B.d), jnp.float16)
    codes, blocks = empty_codes(NUM_SLOTS, LLAMA_7B.d, fmt), jnp.zeros(NUM_SLOTS, jnp.int32)
    return ColumnRows(codes, blocks, table, table if fmt == "q4_1" else None)


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    """Return the shape of a float32 array."""
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def listed() -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return the shapes of a slot list and its count."""
    return jax.ShapeDtypeStruct((NUM_LISTED,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
