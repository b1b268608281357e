"""The paper's ablation in shape, on generated 13B traces, and what a topic switch does; 3 seeds, JSON out."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys

from benchmarks.machine import facts
from kairox_jax.sim import ReplaySettings, Trace, replay
from kairox_jax.sim.generate import GeneratorSettings, generate

# name here: (policy, its parameters, the paper's speed over PowerInfer on PC-Low and PC-High)
STAGES: dict[str, tuple[str, dict, tuple[float, float] | None]] = {
    "static": ("static", {}, (1.0, 1.0)),
    "pipeline": ("topk", {}, (1.91, 1.39)),
    "balancing": ("paper", {"alpha": 0.0}, (3.32, 2.88)),
    "adaptive": ("paper", {}, (3.70, 3.46)),
    "split": ("split", {}, None),
}


def make_trace(seed: int, steps: int, switch: bool, density_bias: float) -> tuple[Trace, Trace]:
    """Return the profiled part and the replayed part of one generated trace at 13B scale (bundles of 9)."""
    settings = GeneratorSettings(bias=density_bias)
    whole = generate(
        settings,
        num_layers=20,
        num_neurons=1536,
        num_steps=2 * steps,
        seed=seed,
        switch_at=steps + steps // 2 if switch else None,
    )
    return whole.cut(slice(0, steps)), whole.cut(slice(steps, None))


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--capacity", type=float, default=0.25)
    parser.add_argument(
        "--biases", type=float, nargs="+", default=[-1.65, -2.5], help="-1.65: 20 %% active, -2.5: 10 %%"
    )
    parser.add_argument(
        "--queues-ms",
        type=float,
        nargs="+",
        default=[4.0, 1.0, 0.5, 0.1],
        help="transfers that may wait for the link",
    )
    args = parser.parse_args()
    result: dict[str, dict] = {}
    for bias, switch, queue_ms in itertools.product(args.biases, (False, True), args.queues_ms):
        for column, machine in enumerate(("pc-low", "pc-high")):
            name = f"{machine}, bias {bias}, queue {queue_ms} ms" + (", topic switch" if switch else "")
            print(name, file=sys.stderr)
            result[name] = measure(args, machine, column, switch, bias, queue_ms)
    print(json.dumps({**vars(args), "machine": facts(), "result": result}, indent=1))


def measure(
    args: argparse.Namespace, machine: str, column: int, switch: bool, bias: float, queue_ms: float
) -> dict[str, dict]:
    """Return time, and how often it goes into the time of ``static``, of each stage; means over seeds."""
    times: dict[str, list[float]] = {name: [] for name in STAGES}
    for seed in range(args.seeds):
        profile, trace = make_trace(seed, args.steps, switch, bias)
        for name, (policy, params, _) in STAGES.items():
            settings = ReplaySettings(
                policy=policy,
                params=params,
                hardware=machine,
                capacity=args.capacity,
                as_model="llama-13b",
                queue_ms=queue_ms,
            )
            totals = replay([trace], settings, [profile.frequencies()]).totals()
            times[name].append(totals["ms_per_token"])
    base = times["static"]
    return {
        name: {
            "ms_per_token": statistics.mean(times[name]),
            "spread_ms": max(times[name]) - min(times[name]),
            "over_static": statistics.mean(b / t for b, t in zip(base, times[name], strict=True)),
            "paper": paper[column] if paper else None,
        }
        for name, (_, _, paper) in STAGES.items()
    }


if __name__ == "__main__":
    main()
