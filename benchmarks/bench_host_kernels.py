"""Speed of the host kernels beside a streaming read of the same memory with the same threads.

Prints a table; ``--json FILE`` writes medians and spreads. ``gb_per_s`` counts the bytes that a call must
read: gate and up rows of all ids, down columns of the active.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import prange

from benchmarks import machine
from kairox_jax.host import LayerFfn, Rule, matvec, residual_ffn, thread_count, threads
from kairox_jax.host.compile import kernel
from kairox_jax.placement.arena import aligned_bytes
from kairox_jax.quant import FORMATS, PackedRows, RecordLayout
from kairox_jax.quant.columns import BLOCK, COLUMN_FORMATS, SharedScales, padded_columns, scales_bytes


@kernel(parallel=True)
def _stream(data, sums):
    """Read every byte once, as 64-bit words, a run for each of many pieces.

    A loop over places in ``data`` is no vector code: the index of a parallel loop is unsigned.
    """
    piece = data.shape[0] // sums.shape[0]
    for c in prange(sums.shape[0]):
        total = np.uint64(0)
        for word in data[c * piece : (c + 1) * piece]:
            total += word
        sums[c] = total


def measure(calls: list[Callable[[], None]], repeats: int) -> list[list[float]]:
    """Time the calls in turn, after one warm-up round, so that noise meets all alike.

    Returns:
        Seconds, a list per call.
    """
    times: list[list[float]] = [[] for _ in calls]
    for round_number in range(repeats + 1):
        for call, samples in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            if round_number:
                samples.append(time.perf_counter() - begin)
    return times


def stream_call(data: np.ndarray) -> Callable[[], None]:
    """Return a call that reads the whole array."""
    words, sums = data.reshape(-1).view(np.uint64), np.zeros(64, np.uint64)
    return lambda: _stream(words, sums)


def row(name: str, seconds: list[float], num_bytes: float, **facts: Any) -> dict[str, Any]:
    """Summarise the samples of one case."""
    median, low, high = (float(np.quantile(seconds, q)) for q in (0.5, 0.1, 0.9))
    return {
        "name": name,
        "ms": median * 1e3,
        "ms_p10": low * 1e3,
        "ms_p90": high * 1e3,
        "gb_per_s": num_bytes / median / 1e9,
        **facts,
    }


def random_bytes(shape: tuple[int, int], format: str, num: int, rng: np.random.Generator) -> np.ndarray:
    """Fill records with plausible weights of a format, cheaply: one random tile, repeated."""
    fmt = FORMATS[format]
    tile = rng.integers(0, 256, (64, shape[1]), np.uint8)
    if fmt.block_elems == 1:
        normal = (rng.normal(size=(64, shape[1] // fmt.block_bytes)) / np.sqrt(num)).astype(np.float32)
        if format == "f16":
            tile = normal.astype(np.float16).view(np.uint8)
        else:
            tile = np.ascontiguousarray(
                normal.view(np.uint8).reshape(*normal.shape, 4)[..., -fmt.block_bytes :]
            )
            tile = tile.reshape(64, -1)
    else:
        blocks = tile.reshape(64, -1, fmt.block_bytes)
        scale = np.float16({"q8_0": 0.0005, "q4_0": 0.008, "q4_1": 0.008}[format])
        blocks[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
        if format == "q4_1":
            blocks[..., 2:4] = np.frombuffer(np.float16(-0.06).tobytes(), np.uint8)
    data = aligned_bytes(*shape)
    for begin in range(0, shape[0], 64):
        data[begin : begin + 64] = tile[: shape[0] - begin]
    return data


def random_records(layout: RecordLayout, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return records of a layout; where down columns share scales, their codes are any bytes."""
    if not layout.shares_scales:
        return random_bytes((count, layout.record_bytes), layout.formats[0], layout.num_elems, rng)
    row_bytes = 2 * FORMATS[layout.formats[0]].row_bytes(layout.num_elems)
    tile = rng.integers(0, 256, (64, layout.record_bytes), np.uint8)
    tile[:, :row_bytes] = random_bytes((64, row_bytes), layout.formats[0], layout.num_elems, rng)
    records = aligned_bytes(count, layout.record_bytes)
    for begin in range(0, count, 64):
        records[begin : begin + 64] = tile[: count - begin]
    return records


def random_scales(layout: RecordLayout, num_neurons: int) -> SharedScales | None:
    """Return a layer's table of scales, None where the layout has none."""
    if not layout.shares_scales:
        return None
    table = np.full((num_neurons // BLOCK, padded_columns(layout.num_elems)), 0.0005, np.float16)
    return SharedScales(table, -table if COLUMN_FORMATS[layout.formats[-1]].has_minima else None)


def bench_model(repeats: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """All neurons of the default model's shape, SiLU with about 45 % active, a layer after the other."""
    num_layers, num, num_neurons = 30, 576, 1536
    records = random_bytes((num_layers * num_neurons, 3 * num * 4), "f32", num, rng)
    layers = records.view(np.float32).reshape(num_layers, num_neurons, 3, num)
    x = rng.normal(size=(1, num)).astype(np.float32)
    out, active = np.zeros_like(x), np.zeros((1, num_neurons), np.uint8)
    ids = np.arange(num_neurons, dtype=np.int32)
    fractions = []

    def token() -> None:
        fractions.clear()
        for layer in layers:
            residual_ffn(x, layer, None, ids, num_neurons, Rule.SILU, 0.15, out, active)
            fractions.append(float(active.mean()))

    def numpy_token() -> None:
        for layer in layers:
            gate, up = layer[:, 0] @ x[0], layer[:, 1] @ x[0]
            out[0] = (gate / (1 + np.exp(-gate)) * up) @ layer[:, 2]

    kernel_s, stream_s = measure([token, stream_call(records)], repeats)
    (numpy_s,) = measure([numpy_token], repeats)  # apart: the threads of NumPy's BLAS spin for a while
    frac = float(np.mean(fractions))
    stream = row("stream", stream_s, records.nbytes, case="model f32")
    touched = records.nbytes * (2 + frac) / 3
    limit = stream["gb_per_s"]
    return [
        stream,
        row("residual_ffn", kernel_s, touched, case="model f32", active_frac=frac, limit_gb_per_s=limit),
        row("numpy dense", numpy_s, records.nbytes, case="model f32", limit_gb_per_s=limit),
    ]


def bench_sparse(
    case: str, repeats: int, size_bytes: float, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """15 % of the records of 7B shapes, at random, beside all of them.

    ``case``: a row format, then "+column" where down columns share scales, then "+int8" for rounded activations.
    """
    num, num_neurons = 4096, 11008
    format, *options = case.split("+")
    down = f"{format}_column" if "column" in options else format
    layout = RecordLayout(num_elems=num, formats=(format, format, down), alignment=1)
    record_bytes = layout.record_bytes
    num_layers = max(1, round(size_bytes / record_bytes / num_neurons))
    records = random_records(layout, num_layers * num_neurons, rng)
    x = np.abs(rng.normal(size=(1, num))).astype(np.float32)
    out, active = np.zeros_like(x), np.zeros((1, num_neurons), np.uint8)
    biases = np.full((num_neurons, 2), 1e3, np.float32)  # every gate passes: each id costs its whole record
    layers = [
        LayerFfn(
            part, biases, Rule.RELU, 0, num=num, layout=layout, scales=random_scales(layout, num_neurons),
            activations="int8" if "int8" in options else "float32",
        )
        for part in records.reshape(num_layers, num_neurons, record_bytes)
    ]  # fmt: skip
    every = np.arange(num_neurons, dtype=np.int32)
    some = [np.sort(rng.permutation(num_neurons)[: int(0.15 * num_neurons)]).astype(np.int32) for _ in layers]

    def token(chosen: list[np.ndarray]) -> None:
        for layer, ids in zip(layers, chosen, strict=True):
            layer(x, ids, ids.size, out, active)

    calls = [lambda: token(some), lambda: token([every] * num_layers), stream_call(records)]
    sparse_s, dense_s, stream_s = measure(calls, repeats)
    title = f"{size_bytes / 1e9:.1f} GB {case}"
    stream = row("stream", stream_s, records.nbytes, case=title)
    limit = stream["gb_per_s"]
    tables = num_layers * scales_bytes(layout.formats[-1], num, num_neurons)  # 15 % need nearly every block's
    touched = num_layers * some[0].size * record_bytes + tables
    speedup = float(np.median(dense_s) / np.median(sparse_s))
    return [
        stream,
        row("15 % of rows", sparse_s, touched, case=title, limit_gb_per_s=limit, times_dense=speedup),
        row("all rows", dense_s, records.nbytes + tables, case=title, limit_gb_per_s=limit),
    ]


def bench_matvec(
    format: str, num_out: int, num: int, repeats: int, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """A matrix of the default model, in as many copies as a token's layers would read."""
    copies = max(1, min(30, int(2e8 / num_out / num)))
    row_bytes = FORMATS[format].row_bytes(num)
    data = random_bytes((copies * num_out, row_bytes), format, num, rng).reshape(copies, num_out, row_bytes)
    x, out = rng.normal(size=(1, num)).astype(np.float32), np.zeros((1, num_out), np.float32)
    matrices = [PackedRows(data=part, format=format) for part in data]

    def token() -> None:
        for matrix in matrices:
            matvec(x, matrix, out)

    (seconds,) = measure([token], repeats)
    per_call = [s / copies for s in seconds]
    rate = num_out * num / float(np.median(per_call)) / 1e9
    return [
        row("matvec", per_call, num_out * row_bytes, case=f"{format} {num_out}x{num}", gweights_per_s=rate)
    ]


def print_table(results: list[dict[str, Any]]) -> None:
    """Print one line a case, with the share of the streaming read."""
    for r in results:
        share = f"{100 * r['gb_per_s'] / r['limit_gb_per_s']:4.0f} %" if "limit_gb_per_s" in r else "      "
        rest = "".join(
            f"  {k} {r[k]:.2f}" for k in ("active_frac", "times_dense", "gweights_per_s") if k in r
        )
        print(
            f"{r['case']:22s} {r['name']:13s} {r['ms']:9.3f} ms ({r['ms_p10']:.3f}-{r['ms_p90']:.3f})"
            f" {r['gb_per_s']:7.2f} GB/s {share}{rest}",
            flush=True,
        )


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--repeats", type=int, default=15, help="samples of each case (default 15)")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="working set of the sparse cases")
    parser.add_argument(
        "--formats", default="f32", help="comma-separated sparse cases, such as q8_0+column+int8"
    )
    parser.add_argument("--parts", default="model,sparse,matvec", help="comma-separated")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    layer = threads.start()
    facts = machine.facts() | {"threads": thread_count(), "layer": layer}
    facts["versions"]["numba"] = numba.__version__
    print(facts)
    results: list[dict[str, Any]] = []
    parts = args.parts.split(",")
    if "model" in parts:
        results += bench_model(args.repeats, rng)
    if "sparse" in parts:
        for format in args.formats.split(","):
            results += bench_sparse(format, args.repeats, args.gigabytes * 1e9, rng)
    if "matvec" in parts:
        for format, num_out, num in (
            ("f32", 576, 576),
            ("q4_1", 576, 576),
            ("q4_1", 192, 576),
            ("q8_0", 49152, 576),
        ):
            results += bench_matvec(format, num_out, num, args.repeats, rng)
    print_table(results)
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
