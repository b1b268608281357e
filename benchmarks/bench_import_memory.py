"""Measure importing and converting a synthetic 4 GB checkpoint: peak memory and time against plain reading.

    python -m benchmarks.bench_import_memory --out benchmarks/results/import_memory.json

The checkpoint has LLaMA-ReLU 7B's shapes in float16, several shards and random weights; it is deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine

CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 9,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "hidden_act": "relu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LAYERS_PER_SHARD = 2
CHUNK_BYTES = 8 * 2**20
GOAL_MEMORY, GOAL_TIME = 1.3, 2.0


def main() -> None:
    """Make the checkpoint, measure, print and write the result, delete the checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; needs 10 GB")
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--worker", choices=("import", "convert"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(work(args.worker, args.model)))
        return
    folder = Path(tempfile.mkdtemp(prefix="kairox-import-", dir=args.folder))
    try:
        result = measure(folder, {**CONFIG, "num_hidden_layers": args.layers}, args.repeat)
    finally:
        shutil.rmtree(folder)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def measure(folder: Path, config: dict[str, Any], repeat: int) -> dict[str, Any]:
    """Return bytes, peak memory and times of reading, importing, copying and converting."""
    model = folder / "model"
    num_bytes = write_model(model, config)
    runs: dict[str, list[float]] = {"read": [], "import": [], "copy": [], "convert": []}
    peaks: dict[str, list[float]] = {"import": [], "convert": []}
    facts: dict[str, Any] = {}
    # Turn by turn, so that a machine that gets slower touches all of them.
    for _ in range(repeat):
        runs["read"].append(timed_read(model))
        runs["copy"].append(timed_copy(model, folder / "copy"))
        for kind in ("import", "convert"):
            forget(model)
            facts[kind] = run_worker(kind, model)
            runs[kind].append(facts[kind]["seconds"])
            peaks[kind].append(facts[kind]["peak_bytes"])
    kept = facts["import"]["kept_bytes"]
    seconds = {name: statistics.median(values) for name, values in runs.items()}
    return {
        "model": config,
        "file_bytes": num_bytes,
        "kept_bytes": kept,
        "peak_growth_over_kept": {name: max(values) / kept for name, values in peaks.items()},
        "goal_memory": GOAL_MEMORY,
        "seconds": seconds,
        "seconds_all": runs,
        "import_over_read": seconds["import"] / seconds["read"],
        "convert_over_copy": seconds["convert"] / seconds["copy"],
        "goal_time": GOAL_TIME,
        "cpu_seconds": {kind: facts[kind]["cpu_seconds"] for kind in peaks},
        "load_average": machine.load_average(),
        "read_gb_per_s": num_bytes / seconds["read"] / 1e9,
        "machine": machine.facts(),
    }


def write_model(folder: Path, config: dict[str, Any]) -> int:
    """Write the checkpoint shard by shard; return the bytes of its weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(shards(config)):
        name = f"model-{number:05d}.safetensors"
        total += write_shard(folder / name, shapes, rng)
        weight_map |= dict.fromkeys(shapes, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def shards(config: dict[str, Any]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Give names and shapes of each shard."""
    dim, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    table = (vocab, dim)
    yield {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": (dim,)}
    layers = range(config["num_hidden_layers"])
    for first in layers[::LAYERS_PER_SHARD]:
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in layers[first : first + LAYERS_PER_SHARD]:
            prefix = f"model.layers.{layer}."
            shapes |= {f"{prefix}self_attn.{part}_proj.weight": (dim, dim) for part in "qkvo"}
            shapes |= {f"{prefix}mlp.{part}_proj.weight": (ffn, dim) for part in ("gate", "up")}
            shapes |= {f"{prefix}mlp.down_proj.weight": (dim, ffn)}
            shapes |= {f"{prefix}{norm}_layernorm.weight": (dim,) for norm in ("input", "post_attention")}
        yield shapes


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> int:
    """Write one safetensors file of random float16 weights of size 2**-6; return the bytes of its data."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = end
        while left:
            bits = rng.integers(0, 2**16, min(left, CHUNK_BYTES) // 2, np.uint16)
            file.write(((bits & 0x83FF) | (9 << 10)).tobytes())
            left -= bits.nbytes
        file.flush()
        os.fsync(file.fileno())
    return end


def files_of(folder: Path) -> list[Path]:
    """List the weights' files."""
    return sorted(folder.glob("*.safetensors"))


def forget(folder: Path) -> None:
    """Drop the files from the system's cache, so that each run reads the disk."""
    for path in files_of(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed_read(folder: Path) -> float:
    """Read all files once, in order; return the seconds."""
    forget(folder)
    buffer, start = bytearray(CHUNK_BYTES), time.perf_counter()
    for path in files_of(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def timed_copy(folder: Path, target: Path) -> float:
    """Copy all files once through memory; return the seconds."""
    forget(folder)
    target.mkdir()
    start = time.perf_counter()
    for path in files_of(folder):
        with path.open("rb") as src, (target / path.name).open("wb") as dst:
            shutil.copyfileobj(src, dst, CHUNK_BYTES)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def run_worker(kind: str, model: Path) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.bench_import_memory",
        "--worker",
        kind,
        "--model",
        str(model),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def work(kind: str, model: Path) -> dict[str, Any]:
    """Import or convert, and report seconds and the growth of this process's memory at its peak."""
    from kairox_jax.io import open_checkpoint
    from kairox_jax.io.convert import Conversion, convert
    from kairox_jax.io.orbax_arrays import load_orbax
    from kairox_jax.placement import load_store

    if kind == "convert":
        load_orbax()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, start, cpu = status_bytes("VmRSS"), time.perf_counter(), time.process_time()
    checkpoint, kept, held = open_checkpoint(model), 0, []
    if kind == "import":
        store = load_store(checkpoint)
        for name in checkpoint.names():
            if ".w_" in name:
                continue
            rows = checkpoint.packed(name) if len(checkpoint.shape(name)) == 2 else None
            if rows is not None:
                checkpoint.check_packed(name)
            # A copy: the file may be on a disk that is taken away.
            held.append(checkpoint.tensor(name) if rows is None else rows.data.copy())
            checkpoint.release()
        kept = store.nbytes + sum(array.nbytes for array in held)
    else:
        convert(
            Conversion(source=checkpoint, target=model.with_name("converted")),
            note=lambda line: print(line, file=sys.stderr),
            report=lambda written, total: None,
        )
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = status_bytes("VmHWM") - before
    shutil.rmtree(model.with_name("converted"), ignore_errors=True)
    return {"seconds": seconds, "cpu_seconds": cpu, "peak_bytes": peak, "kept_bytes": kept}


def status_bytes(field: str) -> int:
    """Read a field of this process's status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


if __name__ == "__main__":
    main()
