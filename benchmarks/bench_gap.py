"""Share of the gap between ``static`` and the offline bound that policies close, in net hits; JSON out.

Net is hits less a price for each load. Real traces (two cuts each, the other text as profile) and generated ones with
and without a topic switch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import numpy as np

from benchmarks.machine import facts
from benchmarks.offline_bound import offline_bound
from kairox_jax.balancing import Costs, Policy, Shape, Times, initial_residents, make_policy
from kairox_jax.io.trace import read_trace
from kairox_jax.sim.compare import parse_policy
from kairox_jax.sim.generate import GeneratorSettings, generate

POLICIES = "static,paper,lfu,dynamic,current-freq,split,split:price=1.5"


def cases(
    paths: list[str], steps: int, seeds: int, num_layers: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return activations [T, L, F] and a profile [L, F] of other steps for each case."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    traces = [read_trace(path) for path in paths]
    for trace, other in zip(traces, reversed(traces), strict=True):
        layers = np.linspace(0, trace.num_layers - 1, num_layers).astype(int)
        for begin in range(0, trace.num_steps - steps + 1, steps):
            rows = np.stack([trace.active(step)[layers] for step in range(begin, begin + steps)])
            found[f"{Path(trace.name).name} from {begin}"] = rows, other.frequencies()[layers]
    for switch in (False, True):
        for seed in range(seeds):
            size = {"num_layers": num_layers, "num_neurons": 1024, "num_steps": 2 * steps}
            at = steps + steps // 2 if switch else None
            whole = generate(GeneratorSettings(), seed=seed, switch_at=at, **size)
            rows = np.stack([whole.active(step) for step in range(steps, 2 * steps)])
            name = f"generated {seed}" + (" with a topic switch" if switch else "")
            found[name] = rows, whole.frequencies(slice(0, steps))
    return found


def serve(
    policy: Policy, active: np.ndarray, prior: np.ndarray, slots: int, max_loads: int
) -> tuple[int, int]:
    """Return hits and loads of a policy whose transfers always arrive in time."""
    steps, layers, neurons = active.shape
    shape = Shape(layers, neurons, slots)
    state, resident = policy.init(shape, prior), initial_residents(policy, shape, prior)
    hits = loads = 0
    for step in range(steps):
        for layer in range(layers):
            costs = Costs(
                max_moves=max_loads,
                free_slots=slots - int(resident[layer].sum()),
                gpu_ms_per_record=1e-4,
                cpu_ms_per_record=4e-3,
                link_ms_per_record=1e-3,
                window_ms=1e-3 * max_loads,
            )
            state, plan = policy.plan(state, layer, active[step, layer], resident[layer], costs)
            resident[layer, plan.evict], resident[layer, plan.load] = False, True
            hits += int(np.count_nonzero(active[step, layer] & resident[layer]))
            loads += plan.load.size
            left = int(np.count_nonzero(active[step, layer] & ~resident[layer]))
            times = Times(0.1, 1e-3 * plan.load.size, 4e-3 * left)
            state = policy.feedback(state, layer, times)
    return hits, loads


def main() -> None:
    """Print one JSON object; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs=2, metavar="TRACE", help="two texts of one model")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--capacity", type=float, default=0.3)
    parser.add_argument("--price", type=float, default=1.5, help="hits that a load costs")
    parser.add_argument("--max-loads", type=int, default=16)
    args = parser.parse_args()
    result: dict[str, dict] = {}
    for name, (active, prior) in cases(args.traces, args.steps, args.seeds, args.layers).items():
        slots, total = int(args.capacity * active.shape[2]), int(active.sum())
        first = initial_residents(make_policy("static"), Shape(args.layers, active.shape[2], slots), prior)
        bound = sum(
            offline_bound(
                active[:, layer], first[layer], slots=slots, load_price=args.price, max_loads=args.max_loads
            )
            for layer in range(args.layers)
        )
        found = {}
        for label in args.policies.split(","):
            policy, params = parse_policy(label)
            hits, loads = serve(make_policy(policy, **params), active, prior, slots, args.max_loads)
            found[label] = {
                "hit_rate": hits / total,
                "loads_per_layer_step": loads / active[:, :, 0].size,
                "net": (hits - args.price * loads) / total,
            }
        least, most = found["static"]["net"], bound / total
        for entry in found.values():
            entry["gap_closed"] = (entry["net"] - least) / (most - least)
        result[name] = {"bound": most, "policies": found}
        closed = ", ".join(f"{label} {entry['gap_closed']:.2f}" for label, entry in found.items())
        print(f"{name}: {closed}", file=sys.stderr)
    means = {
        label: statistics.mean(case["policies"][label]["gap_closed"] for case in result.values())
        for label in args.policies.split(",")
    }
    settings = {**vars(args), "traces": [Path(path).name for path in args.traces]}
    print(json.dumps({**settings, "machine": facts(), "mean_gap_closed": means, "cases": result}, indent=1))


if __name__ == "__main__":
    main()
