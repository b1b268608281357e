"""Compile every GPU kernel and format to machine code without a GPU, and report registers and spills.

``python -m benchmarks.compile_kernels [--json]``: the Pallas kernels, whose Triton IR is taken out of the lowered
program, and the jax-triton twins, for each architecture, with the ``triton`` package (exit 3 where it is missing,
1 where a kernel spills). ``--renew FILE.json`` renews the committed JSON, ``--only OP`` one operation of it;
``--table FILE.json`` prints it as the table of the docs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from benchmarks.compile_twins import (  # noqa: E402
    BLOCKED,
    COLUMNS,
    NUM_LISTED,
    TWINS,
    listed,
    rows_of,
    shape,
    twin_source,
)
from pallas_kernels import gather_down, gather_gate_up, slot_scatter  # noqa: E402
from pallas_kernels.shapes import LLAMA_7B  # noqa: E402

ARCHS = (86, 89, 90)
DTYPES = ("float32", "bfloat16", "float16", *BLOCKED, *COLUMNS)
BATCHES = (1, 2, 4, 8)
NUM_STAGED = 64
ON_CUDA: dict[str, Any] = {"implementation": "pallas", "platform": "cuda"}


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """One row of the report."""

    op: str
    dtype: str
    batch: int
    arch: str
    registers: int
    shared_bytes: int
    spill_bytes: int


def operations() -> dict[str, Callable[[str, int], tuple[Callable, tuple]]]:
    """Return, by name, a function from (dtype, batch) to a jittable call and its argument shapes."""
    return {
        "gather_gate_up_silu": lambda dtype, batch: _gate_up("silu", dtype, batch),
        "gather_gate_up_relu": lambda dtype, batch: _gate_up("relu", dtype, batch),
        "gather_down_atomic": lambda dtype, batch: _down(False, dtype, batch),
        "gather_down_two_pass": lambda dtype, batch: _down(True, dtype, batch),
        "slot_scatter": lambda dtype, batch: _scatter(dtype),
    }


def compile_all(
    archs: tuple[int, ...] = ARCHS,
    dtypes: tuple[str, ...] = DTYPES,
    batches: tuple[int, ...] = BATCHES,
    ops: tuple[str, ...] | None = None,
) -> Iterator[CompiledKernel]:
    """Compile each operation, format and batch for each architecture, at 7B width.

    Args:
        archs: compute capabilities times ten.
        dtypes: formats of the rows.
        batches: batch sizes; ``slot_scatter`` has none and counts as batch 1.
        ops: names of ``operations()`` and ``TWINS``; None for all.
    """
    table = operations()
    for op in ops or (*table, *TWINS):
        for dtype in dtypes:
            if dtype in COLUMNS and "gather_down" not in op:
                continue  # only down weights are kept as columns
            for batch in (1,) if op == "slot_scatter" else batches:
                if op in TWINS:
                    sources: list[Any] = [twin_source(TWINS[op], dtype, batch)]
                else:
                    sources = [TtirSource(kernel) for kernel in _triton_kernels(*table[op](dtype, batch))]
                for arch in archs:
                    yield _worst([_report(op, dtype, batch, source, arch) for source in sources])


def _worst(reports: list[CompiledKernel]) -> CompiledKernel:
    """Merge the kernels of one call (quantised slot_scatter: codes and scales) into their maxima."""
    keys = ("registers", "shared_bytes", "spill_bytes")
    return replace(reports[0], **{key: max(getattr(report, key) for report in reports) for key in keys})


def _gate_up(rule: str, dtype: str, batch: int) -> tuple[Callable, tuple]:
    def call(x, gate, up, slots, n, threshold):
        limit = threshold if rule == "silu" else None
        return gather_gate_up(x, gate, up, slots, n, rule=rule, threshold=limit, **ON_CUDA)

    rows = rows_of(dtype)
    return call, (shape(batch, LLAMA_7B.d), rows, rows, *listed(), shape())


def _down(deterministic: bool, dtype: str, batch: int) -> tuple[Callable, tuple]:
    def call(values, down, slots, n):
        return gather_down(values, down, slots, n, deterministic=deterministic, **ON_CUDA)

    return call, (shape(batch, NUM_LISTED), rows_of(dtype), *listed())


def _scatter(dtype: str) -> tuple[Callable, tuple]:
    row_bytes = {"q8_0": 34, "q4_0": 18, "q4_1": 20}.get(dtype, 0) * LLAMA_7B.d // 32
    staging = jax.ShapeDtypeStruct((NUM_STAGED, 3, row_bytes or LLAMA_7B.d), "uint8" if row_bytes else dtype)
    slots = jax.ShapeDtypeStruct((NUM_STAGED,), jnp.int32)
    return lambda *args: slot_scatter(*args, **ON_CUDA), ((rows_of(dtype),) * 3, staging, slots)


def _abstract_gpu() -> contextlib.AbstractContextManager:
    """Name a device for the lowering: from jax 0.11 on, Pallas-Triton asks which one."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    sharding = jax.sharding
    device = sharding.AbstractDevice("NVIDIA GeForce RTX 4090", 1, "cuda")
    return sharding.use_abstract_mesh(sharding.AbstractMesh((), (), abstract_device=device))


@dataclass(frozen=True, kw_only=True)
class TritonKernel:
    """Triton IR of a kernel and its launch parameters."""

    ir_text: str
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class TtirSource:
    """A kernel that Pallas lowered, for ``triton.compile``."""

    kernel: TritonKernel

    @property
    def options(self) -> dict[str, int]:
        """Options of the compiler."""
        return {"num_warps": self.kernel.num_warps, "num_stages": self.kernel.num_stages}

    @contextlib.contextmanager
    def opened(self) -> Iterator[str]:
        """Give a file; its suffix tells ``triton.compile`` where to start."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernel.ttir")
            path.write_text(self.kernel.ir_text)
            yield str(path)


def _triton_kernels(call: Callable, args: tuple) -> list[TritonKernel]:
    """Lower a call for CUDA and return the Triton kernels inside."""
    with _abstract_gpu():
        lowered = jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",))
    kernels: list[TritonKernel] = []
    module: Any = lowered.compiler_ir("stablehlo")
    _walk(module.operation, kernels)
    if not kernels:
        raise RuntimeError(
            "no Triton kernel in the lowered program: expected a custom call to xla.gpu.triton"
        )
    return kernels


def _walk(op, kernels: list[TritonKernel]) -> None:
    ir = importlib.import_module("jax._src.lib.mlir").ir
    if (
        op.name == "stablehlo.custom_call"
        and "triton" in ir.StringAttr(op.attributes["call_target_name"]).value
    ):
        name = "mhlo.backend_config" if "mhlo.backend_config" in op.attributes else "backend_config"
        config = {entry.name: entry.attr for entry in ir.DictAttr(op.attributes[name])}
        kernels.append(
            TritonKernel(
                ir_text=_ir_text(ir.StringAttr(config["ir"]).value_bytes),
                num_warps=ir.IntegerAttr(config["num_warps"]).value,
                num_stages=ir.IntegerAttr(config["num_stages"]).value,
            )
        )
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                _walk(inner.operation, kernels)


def _ir_text(bytecode: bytes) -> str:
    mlir = importlib.import_module("jax._src.interpreters.mlir")
    triton_dialect = importlib.import_module("jax._src.lib.triton")
    ir = importlib.import_module("jax._src.lib.mlir").ir
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        triton_dialect.dialect.register_dialect(context)
        return ir.Module.parse(bytecode).operation.get_asm(enable_debug_info=False)


def _report(op: str, dtype: str, batch: int, source: Any, arch: int) -> CompiledKernel:
    triton = importlib.import_module("triton")  # optional: only this report needs it
    gpu_target = importlib.import_module("triton.backends.compiler").GPUTarget
    with source.opened() as opened:
        compiled = triton.compile(opened, target=gpu_target("cuda", arch, 32), options=source.options)
    registers, spill_bytes = resources(compiled.asm["cubin"])
    return CompiledKernel(
        op=op, dtype=dtype, batch=batch, arch=f"sm_{arch}", registers=registers,
        shared_bytes=compiled.metadata.shared, spill_bytes=spill_bytes,
    )  # fmt: skip


def resources(cubin: bytes) -> tuple[int, int]:
    """Return registers a thread and bytes of local memory a thread (spills) of a cubin."""
    tool = Path(str(importlib.import_module("triton").__file__)).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {report[:200]!r}")
    return int(found[1]), int(found[2]) + int(found[3])


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table: one line for each op, dtype and batch; registers for each architecture."""
    archs = sorted({row["arch"] for row in rows})
    groups: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["dtype"], row["batch"]), {})[row["arch"]] = row
    lines = [
        " | ".join(
            [
                "| operation",
                "rows",
                "batch",
                *(f"{arch} registers" for arch in archs),
                "shared bytes",
                "spills |",
            ]
        ),
        "|---|---|---|" + "---|" * (len(archs) + 2),
    ]
    for (op, dtype, batch), cell in groups.items():
        registers = " | ".join(str(cell[arch]["registers"]) for arch in archs)
        shared, spills = (max(row[key] for row in cell.values()) for key in ("shared_bytes", "spill_bytes"))
        lines.append(f"| {op} | {dtype} | {batch} | {registers} | {shared} | {spills} |")
    return "\n".join(lines)


def renew(file: Path, rows: list[dict[str, Any]], ops: Sequence[str]) -> None:
    """Replace the entries of some operations in a saved JSON."""
    order = [*operations(), *TWINS]
    kept = [row for row in json.loads(file.read_text()) if row["op"] not in ops] if file.exists() else []
    merged = sorted(kept + rows, key=lambda row: order.index(row["op"]))  # stable: else as compiled
    file.write_text(json.dumps(merged, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_kernels", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print a list of objects, not a table")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a saved JSON and stop")
    parser.add_argument("--renew", type=Path, metavar="FILE", help="write JSON; keep what --only leaves out")
    known = (*operations(), *TWINS)
    parser.add_argument("--only", action="append", choices=known, metavar="OP", help=", ".join(known))
    args = parser.parse_args(argv)
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return 0
    try:
        importlib.import_module("triton")
    except ImportError:
        print("the triton package is not installed: pip install triton (no GPU is needed)", file=sys.stderr)
        return 3
    rows = [asdict(row) for row in compile_all(ops=tuple(args.only) if args.only else None)]
    if args.renew:
        renew(args.renew, rows, args.only or known)
    else:
        print(json.dumps(rows, indent=1) if args.json else table(rows))
    spilled = [row for row in rows if row["spill_bytes"]]
    for row in spilled:
        print(f"spills: {row}", file=sys.stderr)
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
