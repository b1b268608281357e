"""Decoding of a synthetic ReLU model under VRAM budgets with each policy; a process for each budget.

``python -m benchmarks.gpu.decode --size quick --layers 4 --budget 6000000000`` prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from time import perf_counter
from typing import Any

import jax
import numpy as np

from benchmarks.gpu.settings import SIZES, Settings, TimeBox
from benchmarks.gpu.synthetic import SyntheticModel
from benchmarks.gpu.timing import one_line
from benchmarks.machine import ROOT
from kairox_jax.balancing import make_policy
from kairox_jax.config import PlacementConfig
from kairox_jax.engine.dense_part import DeviceDense
from kairox_jax.engine.hybrid import Hybrid
from kairox_jax.engine.loading import make_plan
from kairox_jax.nvidia import limit_device_memory
from kairox_jax.placement import load_store, record_layouts, resolve_slot_format
from pallas_kernels.implementations import resolve_implementation

RECORD_BYTES = 3 * 34 / 32  # a weight of the model's width, in q8_0
HOST_SHARE = 0.6  # of the free host memory, for the neurons
PROMPT, WARM_UP = 8, 3
CONTEXT = 256
NEXT_BUDGET_S = 20.0  # less than this is not worth a new process


def run(settings: Settings, box: TimeBox, size: str = "full") -> dict[str, Any]:
    """Return one row for each number of layers, budget and policy; starts a process for each budget."""
    rows: list[dict[str, Any]] = []
    cut = False
    depths = sorted({settings.model[0], max(settings.model[0], layers_that_fit(settings))})
    for layers in depths:
        for budget in settings.budgets:
            if box.left_s < NEXT_BUDGET_S:
                cut = True
                continue
            rows += _in_a_process(size, layers, budget, box.left_s)
    return {"rows": rows, "cut": cut}


def layers_that_fit(settings: Settings) -> int:
    """Return the layers whose neurons the host's free memory holds, at most ``more_layers``."""
    _, width, neurons, *_ = settings.model
    free = next(
        int(line.split()[1]) * 1024
        for line in open("/proc/meminfo").read().splitlines()
        if line.startswith("MemAvailable")
    )
    return min(settings.more_layers, int(HOST_SHARE * free / (neurons * width * RECORD_BYTES)))


def _in_a_process(size: str, layers: int, budget: int, seconds: float) -> list[dict[str, Any]]:
    """Run one budget; a crash or a hang becomes a row that says so."""
    fact = {"layers": layers, "budget_bytes": budget}
    command = [sys.executable, "-m", "benchmarks.gpu.decode", "--size", size, "--layers", str(layers)]
    command += ["--budget", str(budget), "--seconds", str(seconds - 5)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + 30)
    except subprocess.TimeoutExpired:
        return [fact | {"failed": f"no answer in {seconds + 30:.0f} s"}]
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return [fact | {"failed": lines[-1][:300]}]
    return json.loads(done.stdout.splitlines()[-1])


def decode(settings: Settings, layers: int, budget: int, box: TimeBox) -> list[dict[str, Any]]:
    """Return a row for each policy, in this process.

    Raises:
        ValueError: the budget does not hold the dense part.
    """
    source = SyntheticModel(layers, *settings.model[1:])
    device = jax.devices()[0]
    placement = PlacementConfig(vram_budget_bytes=budget)
    plan = make_plan(
        source.config, record_layouts(source), mode="exact", placement=placement, context_length=CONTEXT,
        parallel=1, device=device,
    )  # fmt: skip
    store = load_store(source)
    dense = DeviceDense(source, batch=1, context_length=CONTEXT)
    fact = {"layers": layers, "budget_bytes": budget, "slots_per_layer": plan.slots_per_layer}
    rows = []
    for name in settings.policies:
        if box.over:
            break
        rows.append(
            fact
            | {"policy": name}
            | _with_policy(name, source, store, dense, plan.slots_per_layer, settings, box)
        )
    return rows


def _with_policy(
    name: str, source: Any, store: Any, dense: Any, slots: int, settings: Settings, box: TimeBox
) -> dict[str, Any]:
    """Decode some tokens with one policy, or say why not."""
    try:
        hybrid = Hybrid(
            store, dense, config=source.config, thresholds=np.zeros(source.config.num_layers, np.float32),
            policy=make_policy(name), prior=source.frequencies, slots_per_layer=slots, max_moves=64,
            slot_format=resolve_slot_format("auto", jax.default_backend()),
            implementation=resolve_implementation("auto"),
        )  # fmt: skip
    except Exception as error:  # a policy that cannot run is a result
        return {"failed": one_line(error)}
    try:
        return _decode_tokens(hybrid, source.config.vocab_size, settings.tokens, box)
    except Exception as error:
        return {"failed": one_line(error)}
    finally:
        hybrid.close()


def _decode_tokens(hybrid: Any, vocab_size: int, num_tokens: int, box: TimeBox) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    hybrid.prefill_logits(rng.integers(3, vocab_size, PROMPT).astype(np.int32), 0, 0)
    seconds, counts = [], []
    for step in range(WARM_UP + num_tokens):
        token, at = rng.integers(3, vocab_size, 1).astype(np.int32), np.array([PROMPT + step], np.int32)
        begin = perf_counter()
        _, count = hybrid.step(token, at, np.zeros(1, np.int32))
        if step >= WARM_UP:
            seconds.append(perf_counter() - begin)
            counts.append(count)
            if box.over:
                break
    hits, residual = (sum(int(getattr(c, part).sum()) for c in counts) for part in ("hits", "residual"))
    steps = len(counts)
    return {
        "tokens": steps,
        "tokens_per_s": 1 / float(np.median(seconds)),
        "active_frac": float(np.mean([count.active.mean() for count in counts])),
        "hit_frac": hits / max(hits + residual, 1),
        "promotions": sum(count.moves.promotions for count in counts),
        "link_bytes": sum(count.moves.link_bytes for count in counts),
        "t_gpu_ms": sum(count.times.gpu_ms for count in counts) / steps,
        "t_io_ms": sum(count.times.io_ms for count in counts) / steps,
        "t_cpu_ms": sum(count.times.cpu_ms for count in counts) / steps,
    }


def main(argv: list[str] | None = None) -> int:
    """Run one budget and print its rows as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.decode", description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--budget", type=int, required=True, help="bytes")
    parser.add_argument("--seconds", type=float, default=120.0)
    args = parser.parse_args(argv)
    box = TimeBox(args.seconds)
    try:
        limit_device_memory(args.budget)  # before the first JAX call opens the device
        rows = decode(SIZES[args.size], args.layers, args.budget, box)
    except ValueError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return 2
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
