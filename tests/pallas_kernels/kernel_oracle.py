"""NumPy float64 answers, the table of tolerances and the implementations that every suite runs over."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import ColumnRows, Rows, split_blocks

# ||out - oracle|| / ||oracle||. The oracle sees the weights after rounding to the format, and all sums are
# float32, so the narrow formats need no more room.
TOLERANCES = dict.fromkeys(
    ("float32", "bfloat16", "float16", "q8_0", "q4_0", "q4_1", "q8_0_column", "q4_0_column", "q4_1_column"),
    2e-6,
)
NARROW = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "uint8": np.uint8}
HAS_GPU = jax.default_backend() == "gpu"
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="jax.default_backend() is not 'gpu'")]
IMPLEMENTATIONS = [
    pytest.param({"implementation": "xla"}, id="xla"),
    pytest.param({"implementation": "pallas", "interpret": True}, id="pallas-interpret"),
    pytest.param({"implementation": "pallas"}, id="pallas-gpu", marks=on_gpu),
    pytest.param({"implementation": "triton"}, id="triton-gpu", marks=on_gpu),
]


def jit(function: Callable) -> Callable:
    """Jit for a single call: interpreted kernels are large programs, so optimise little."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def relative_error(out, oracle: np.ndarray) -> float:
    """Return ||out - oracle|| / ||oracle||; where the oracle is all zeros, ||out||. NaN stays NaN."""
    difference = np.linalg.norm(np.asarray(out, np.float64) - oracle)
    norm = np.linalg.norm(oracle)
    return float(difference / norm if norm else difference)


def stored(array: np.ndarray | None, dtype: str) -> tuple[Rows | ColumnRows | None, np.ndarray | None]:
    """Return rows as the kernels hold them, and the weights that they stand for, by the gguf package."""
    if array is None:
        return None, None
    if dtype in NARROW:
        rounded = array.astype(NARROW[dtype])
        return jnp.asarray(rounded), rounded
    if dtype.endswith("_column"):
        return shared_columns(array, dtype.removesuffix("_column"))
    raw, weights = quantised(array, dtype)
    return split_blocks(jnp.asarray(raw), dtype), weights


def quantised(array: np.ndarray, fmt: str) -> tuple[np.ndarray, np.ndarray]:
    """Return GGUF bytes of rows and their weights, both by the gguf package."""
    kind = gguf.GGMLQuantizationType[fmt.upper()]
    raw = gguf.quants.quantize(array, kind)
    return raw, gguf.quants.dequantize(raw, kind)


def shared_columns(array: np.ndarray, fmt: str) -> tuple[ColumnRows, np.ndarray]:
    """Return rows as the columns of a matrix in blocks of 32 columns, shuffled, and their weights, by gguf."""
    num, d = array.shape
    neurons = np.random.default_rng(1).permutation(-(-num // 32) * 32)
    matrix = np.zeros((d, neurons.size), np.float32)
    matrix[:, neurons[:num]] = array.T
    raw, weights = quantised(matrix, fmt)
    blocks = raw.reshape(d, neurons.size // 32, -1)
    head = 4 if fmt == "q4_1" else 2
    padded = -(-d // 32) * 32

    def table(at: int) -> jnp.ndarray:
        halves = np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[..., 0].T
        return jnp.asarray(np.pad(halves, ((0, 0), (0, padded - d))))

    codes = np.zeros((num, padded), np.uint8)
    for c, neuron in enumerate(neurons[:num]):
        block, place = divmod(int(neuron), 32)
        of_block = blocks[:, block, head:]
        if fmt == "q8_0":
            codes[c, :d] = of_block[:, place]
        else:
            codes[c, :d] = (of_block[:, place % 16] >> (4 if place >= 16 else 0)) & 15
    groups = codes.reshape(num, -1, 32)
    held = groups.view(np.int8) if fmt == "q8_0" else groups[..., :16] | groups[..., 16:] << 4
    minima = table(2) if fmt == "q4_1" else None
    rows = ColumnRows(jnp.asarray(held), jnp.asarray(neurons[:num] // 32, jnp.int32), table(0), minima)
    return rows, weights[:, neurons[:num]].T


def products(x: np.ndarray, w: np.ndarray | None, bias: np.ndarray | None) -> np.ndarray | None:
    """Return x @ w.T + bias in float64, [B, C]."""
    if w is None:
        return None
    out = x.astype(np.float64) @ w.astype(np.float64).T
    return out if bias is None else out + bias.astype(np.float64)


def scores_of(rule: str, g: np.ndarray | None, u: np.ndarray) -> np.ndarray:
    """Return what the rule compares with its threshold."""
    first = u if g is None else g
    if rule != "silu":
        return first
    return np.abs(first / (1 + np.exp(-first)) * (1.0 if g is None else u))


def gate_up(inputs: dict, rule: str, threshold: float) -> np.ndarray:
    """Return float64 [B, K], neuron by neuron."""
    g = products(inputs["x"], inputs["gate"], inputs["gate_bias"])
    u = products(inputs["x"], inputs["up"], inputs["up_bias"])
    assert u is not None
    values = np.zeros((len(u), len(inputs["slots"])))
    for b in range(len(u)):
        for k, slot in enumerate(inputs["slots"][: inputs["n"]]):
            if 0 <= slot < u.shape[1]:
                values[b, k] = one_value(rule, None if g is None else g[b, slot], u[b, slot], threshold)
    return values


def one_value(rule: str, g: float | None, u: float, threshold: float) -> float:
    """Return the value of one neuron from its products."""
    first, second = (u, 1.0) if g is None else (g, u)
    if rule == "silu":
        z = first / (1 + np.exp(-first)) * second
        if abs(z) <= threshold:
            return 0.0
        return z if abs(z) >= threshold * 1.5 else np.sign(z) * (abs(z) - threshold) * 3
    if rule == "fatrelu":
        return first * second if first > threshold else 0.0
    if first <= 0:
        return 0.0
    return {"relu": first * second, "relu2": first**2 * second, "drelu": first * max(u, 0.0)}[rule]


def down_sum(values: np.ndarray, down: np.ndarray, slots: np.ndarray, n: int) -> np.ndarray:
    """Return float64 [B, D], row by row."""
    out = np.zeros((len(values), down.shape[1]))
    for k, slot in enumerate(slots[:n]):
        if 0 <= slot < len(down):
            out += np.outer(values[:, k].astype(np.float64), down[slot].astype(np.float64))
    return out
