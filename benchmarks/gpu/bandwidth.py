"""Bandwidth: GB/s at which the kernels move the rows they must, beside plain XLA, the dense product and a copy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.settings import Settings, TimeBox
from benchmarks.gpu.timing import implementations, median_s, one_line
from pallas_kernels import BlockRows, Rows, gather_down, gather_gate_up
from pallas_kernels.block_rows import BLOCK, FORMATS
from pallas_kernels.shapes import ModelShape

ROW_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
ROW_BYTES["q4_1"] = 20 / 32


def run(settings: Settings, box: TimeBox) -> dict[str, Any]:
    """Return the copy's bandwidth and one row for each shape, format, share and implementation."""
    copy = copy_gb_per_s(settings)
    rows, cut = [], False
    for shape in settings.shapes:
        for dtype in settings.dtypes[1:] if shape is settings.shapes[0] else settings.dtypes[1:2]:
            rows_of_layer = _layer(shape, dtype)
            for frac in settings.active_fracs:
                lists = _lists(shape, frac, settings.lists)
                for name in (*implementations(), "dense"):
                    if box.over:
                        cut = True
                        continue
                    fact = {"shape": shape.name, "dtype": dtype, "active_frac": frac, "implementation": name}
                    rows.append(fact | _measure(rows_of_layer, lists, shape, dtype, name, settings, copy))
            del rows_of_layer
    return {"copy_gb_per_s": copy, "rows": rows, "cut": cut}


def copy_gb_per_s(settings: Settings) -> float:
    """Return the bytes read and written by a plain copy, in GB/s."""
    array = jnp.ones(settings.copy_bytes // 4, jnp.float32)
    program = jax.jit(lambda a: a * 2.0)
    return 2 * array.nbytes / median_s(lambda: program(array), settings.repeats) / 1e9


def _layer(shape: ModelShape, dtype: str) -> tuple[Rows, Rows, Rows]:
    """Return gate, up and down rows of a layer; all positive, so that every listed neuron is active."""
    return tuple(_rows(jax.random.key(part), shape, dtype) for part in range(3))  # type: ignore[return-value]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _rows(key: jax.Array, shape: ModelShape, dtype: str) -> Rows:
    if dtype not in FORMATS:
        return jax.random.uniform(key, (shape.f, shape.d), jnp.float32, 0.0, 1e-3).astype(dtype)
    blocks, width = shape.d // BLOCK, BLOCK if dtype == "q8_0" else BLOCK // 2
    kind = jnp.int8 if dtype == "q8_0" else jnp.uint8
    codes = jax.random.randint(key, (shape.f, blocks, width), 1, 100, jnp.int32)
    codes = codes if dtype == "q8_0" else codes % 8 + 8 + 16 * (codes % 7 + 9)  # both halves above 8
    scales = jnp.full((shape.f, blocks), 1e-5, jnp.float16)
    return BlockRows(codes.astype(kind), scales, scales if dtype == "q4_1" else None)


def _lists(shape: ModelShape, frac: float, count: int) -> np.ndarray:
    """Return different lists of slots, [count, K]: the caches of the device do not hold them all."""
    rng, k = np.random.default_rng(0), max(1, round(frac * shape.f))
    return np.stack([np.sort(rng.permutation(shape.f)[:k]) for _ in range(count)]).astype(np.int32)


def _measure(
    layer: tuple[Rows, Rows, Rows], lists: np.ndarray, shape: ModelShape, dtype: str, name: str,
    settings: Settings, copy: float,
) -> dict[str, Any]:  # fmt: skip
    """Return the time of one FFN and its bandwidth, or why there is none."""
    count, k = lists.shape
    options = implementations()["xla" if name == "dense" else name]

    def ffn(x: jax.Array, layer: tuple[Rows, Rows, Rows], slots: jax.Array) -> jax.Array:
        gate, up, down = layer
        if name == "dense":
            every = jnp.ones(shape.f, bool)
            chosen: dict[str, Any] = {"slots": None, "n": None, "valid": every}
        else:
            chosen = {"slots": slots, "n": jnp.int32(k)}
        values = gather_gate_up(x, gate, up, rule="relu", threshold=None, **chosen, **options)
        return gather_down(values, down, deterministic=True, **chosen, **options)

    @jax.jit
    def program(x: jax.Array, layer: tuple[Rows, Rows, Rows], lists: jax.Array) -> jax.Array:
        def body(i: jax.Array, x: jax.Array) -> jax.Array:
            return x + 1e-9 * ffn(x, layer, lists[i])  # each FFN waits for the one before

        return jax.lax.fori_loop(0, count, body, x)

    x, on_device = jnp.ones((1, shape.d), jnp.float32), jnp.asarray(lists)
    try:
        seconds = median_s(lambda: program(x, layer, on_device), settings.repeats) / count
    except Exception as error:  # one kernel's failure is a result
        return {"failed": one_line(error)}
    moved = 3 * (shape.f if name == "dense" else k) * shape.d * ROW_BYTES[dtype]
    speed = moved / seconds / 1e9
    return {"us": seconds * 1e6, "gb_per_s": speed, "of_copy_frac": speed / copy}
