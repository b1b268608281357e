"""Numerics: every kernel and implementation on the cases of its folder against NumPy float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.settings import Settings, TimeBox
from benchmarks.gpu.timing import implementations, one_line
from kairox_jax.quant import COLUMN_FORMATS, PackedRows, split_columns
from kairox_jax.quant.columns import padded_columns
from pallas_kernels import ColumnRows, empty_codes, gather_down, gather_gate_up, slot_scatter, split_blocks
from pallas_kernels.block_rows import BLOCK
from pallas_kernels.block_rows import FORMATS as BLOCKED
from pallas_kernels.gather_down import cases as down_cases
from pallas_kernels.gather_gate_up import cases as gate_up_cases
from pallas_kernels.slot_scatter import cases as scatter_cases

TOLERANCE = 2e-6  # relative; the oracle sees the weights after rounding to their format, and sums are float32
Check = tuple[str, Callable[[dict[str, Any]], Any], np.ndarray]


def run(settings: Settings, box: TimeBox) -> dict[str, Any]:
    """Return one row for each operation, case and implementation: its error, or why it did not run."""
    rows, cut = [], False
    for name, call, expected in _checks(settings):
        for implementation, options in implementations().items():
            if implementation == "triton" and name.startswith("slot_scatter"):
                continue  # has no twin
            if box.over:
                cut = True
                continue
            row: dict[str, Any] = {"case": name, "implementation": implementation}
            try:
                row["error"] = relative_error(call(options), expected)
                row["ok"] = bool(row["error"] <= TOLERANCE)
            except Exception as error:  # one kernel's failure is a result
                row["failed"] = one_line(error)
            rows.append(row)
    return {"tolerance": TOLERANCE, "rows": rows, "cut": cut}


def relative_error(out: Any, expected: np.ndarray) -> float:
    """Return ||out - expected|| / ||expected||; where that is all zeros, ||out||."""
    difference = np.linalg.norm(np.asarray(out, np.float64) - expected)
    norm = np.linalg.norm(expected)
    return float(difference / norm if norm else difference)


def stored(array: np.ndarray | None, dtype: str) -> tuple[Any, np.ndarray | None]:
    """Return rows as the kernels hold them, and the weights that they stand for."""
    if array is None:
        return None, None
    if dtype in BLOCKED:
        kind = gguf.GGMLQuantizationType[dtype.upper()]
        raw = gguf.quants.quantize(array, kind)
        return split_blocks(jnp.asarray(raw), dtype), gguf.quants.dequantize(raw, kind).astype(np.float64)
    if dtype in COLUMN_FORMATS:
        return _columns(array, COLUMN_FORMATS[dtype].source)
    held = jnp.asarray(array, dtype)
    return held, np.asarray(held, np.float64)


def _columns(array: np.ndarray, source: str) -> tuple[ColumnRows, np.ndarray]:
    """Return rows as the columns of a matrix in blocks along its rows, padded to whole groups."""
    num, d = array.shape
    matrix = np.zeros((d, padded_columns(num)), np.float32)
    matrix[:, :num] = array.T
    kind = gguf.GGMLQuantizationType[source.upper()]
    raw = gguf.quants.quantize(matrix, kind)
    codes, tables = split_columns(PackedRows(data=raw, format=source))
    empty = empty_codes(num, d, source)
    held = codes[:num].view(empty.dtype).reshape(empty.shape)
    minima = None if tables.minima is None else jnp.asarray(tables.minima)
    blocks = jnp.arange(num, dtype=jnp.int32) // BLOCK
    weights = np.zeros((num, padded_columns(d)))
    weights[:, :d] = gguf.quants.dequantize(raw, kind)[:, :num].T
    return ColumnRows(jnp.asarray(held), blocks, jnp.asarray(tables.scales), minima), weights


def _checks(settings: Settings) -> Iterator[Check]:
    """Yield (name, function of the options, answer)."""
    rng = np.random.default_rng(0)

    def few(cases: tuple[Any, ...]) -> list[Any]:
        dtypes = (*settings.dtypes, "uint8")
        chosen = [case for case in cases if case.dtype.removesuffix("_column") in dtypes]
        plain = [case for case in chosen if case.dtype == "float32"][: settings.case_limit]
        return plain + [case for case in chosen if case.dtype != "float32"][: settings.case_limit]

    for case in few(gate_up_cases.CASES):
        yield _gate_up(case, rng)
    for case in few(down_cases.CASES):
        yield _down(case, rng)
    for case in few(scatter_cases.CASES):
        if case.dtype not in (*BLOCKED, "uint8"):
            yield _scatter(case, rng)


def _gate_up(case: gate_up_cases.GateUpCase, rng: np.random.Generator) -> Check:
    inputs: dict[str, Any] = gate_up_cases.make_inputs(case, rng)
    gate, gate64 = stored(inputs["gate"], case.dtype)
    up, up64 = stored(inputs["up"], case.dtype)
    assert up is not None and up64 is not None
    x64 = inputs["x"].astype(np.float64)
    u = x64 @ up64.T + (0 if inputs["up_bias"] is None else inputs["up_bias"])
    g = (
        None
        if gate64 is None
        else x64 @ gate64.T + (0 if inputs["gate_bias"] is None else inputs["gate_bias"])
    )
    first = u if g is None else g
    silu = first / (1 + np.exp(-first)) * (1.0 if g is None else u)
    threshold = gate_up_cases.gap_threshold(case, np.abs(silu) if case.rule == "silu" else first)
    z = values64(case.rule, first, None if g is None else u, silu, threshold)
    at = np.arange(case.k)
    listed = (at < case.n) & (inputs["slots"] >= 0)
    expected = np.where(listed[None], z[:, np.where(listed, inputs["slots"], 0)], 0.0)
    biases: Any = (inputs["gate_bias"], inputs["up_bias"]) if case.biases else None
    limit = threshold if case.rule in ("silu", "fatrelu") else None

    def call(options: dict[str, Any]) -> Any:
        program = jax.jit(
            lambda x, gate, up, slots, n: gather_gate_up(
                x, gate, up, slots, n, rule=case.rule, threshold=limit, biases=biases, **options
            )
        )
        return program(inputs["x"], gate, up, inputs["slots"], inputs["n"])

    return f"gather_gate_up/{case.name}", call, expected


def values64(
    rule: str, first: np.ndarray, up: np.ndarray | None, silu: np.ndarray, threshold: float
) -> np.ndarray:
    """Return each neuron's value from its products; ``first`` is the gate's, or the up's without gate."""
    if rule == "silu":
        size = np.abs(silu)
        return np.sign(silu) * np.clip(3 * (size - threshold), 0, size)  # in part up to 1.5 thresholds
    if rule == "fatrelu":
        return np.where(first > threshold, first, 0.0) * (1.0 if up is None else up)
    positive = np.maximum(first, 0.0)
    second = 1.0 if up is None else np.maximum(up, 0.0) if rule == "drelu" else up
    return (positive**2 if rule == "relu2" else positive) * second


def _down(case: down_cases.DownCase, rng: np.random.Generator) -> Check:
    inputs = down_cases.make_inputs(case, rng)
    down, down64 = stored(inputs["down"], case.dtype)
    assert down is not None and down64 is not None
    listed = (np.arange(case.k) < case.n) & (inputs["slots"] >= 0)
    weights = np.where(listed[None], inputs["values"].astype(np.float64), 0.0)
    expected = weights @ down64[np.where(listed, inputs["slots"], 0)]

    def call(options: dict[str, Any]) -> Any:
        program = jax.jit(
            lambda values, down, slots, n: gather_down(values, down, slots, n, deterministic=True, **options)
        )
        return program(inputs["values"], down, inputs["slots"], inputs["n"])

    return f"gather_down/{case.name}", call, expected


def _scatter(case: scatter_cases.ScatterCase, rng: np.random.Generator) -> Check:
    cache, staging, slots = scatter_cases.make_inputs(case, rng)
    expected = np.stack(cache).astype(np.float64)
    inside = (slots >= 0) & (slots < case.c)
    expected[:, slots[inside]] = staging[inside].transpose(1, 0, 2)

    def call(options: dict[str, Any]) -> Any:
        program = jax.jit(lambda *args: slot_scatter(*args, **options))
        rows = tuple(jnp.asarray(array, case.dtype) for array in cache)
        return np.stack(
            [np.asarray(r, np.float64) for r in program(rows, jnp.asarray(staging, case.dtype), slots)]
        )

    return f"slot_scatter/{case.name}", call, expected
