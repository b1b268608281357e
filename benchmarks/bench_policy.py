"""Host time of a policy's plan and feedback for one token, at a large model's shape.

Beside the clock, the thread's own processor time, which other programs that take turns on the core do not lengthen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from benchmarks.machine import facts, load_average
from kairox_jax.balancing import POLICIES, Costs, Shape, Times, initial_residents, make_policy


class Stopwatch:
    """Adds up what its ``with`` blocks take, by the clock and of the thread's processor time."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def __enter__(self) -> None:
        self._cpu = time.thread_time()
        self._begin = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.wall_s += time.perf_counter() - self._begin
        self.cpu_s += time.thread_time() - self._cpu


def token_ms(
    name: str, layers: int, neurons: int, capacity: float, density: float, tokens: int
) -> list[tuple[float, float]]:
    """Return what plan and feedback of all layers took, for each token after three warm-up tokens.

    Returns:
        Milliseconds by the clock and of the thread's processor time.
    """
    rng = np.random.default_rng(0)
    prior = rng.beta(0.4, 1.6, (layers, neurons)).astype(np.float32)
    prior *= density / prior.mean()
    shape, policy = Shape(layers, neurons, int(capacity * neurons)), make_policy(name)
    state, resident = policy.init(shape, prior), initial_residents(policy, shape, prior)
    times = []
    for _ in range(tokens + 3):
        active = rng.random((layers, neurons)) < prior
        watch = Stopwatch()
        for layer in range(layers):
            costs = Costs(
                max_moves=neurons,
                free_slots=int(shape.capacity[layer] - resident[layer].sum()),
                gpu_ms_per_record=6e-5,
                cpu_ms_per_record=2.4e-3,
                link_ms_per_record=1.0e-3,
                link_ms_fixed=3.3e-3,
                window_ms=0.5,
                can_wait=True,
            )
            with watch:
                state, plan = policy.plan(state, layer, active[layer], resident[layer], costs)
            resident[layer, plan.evict], resident[layer, plan.load] = False, True
            left, loads = np.count_nonzero(active[layer] & ~resident[layer]), plan.load.size
            io_ms = costs.link_ms_fixed + costs.link_ms_per_record * loads if loads else 0.0
            measured = Times(0.2, io_ms, costs.cpu_ms_per_record * left)
            with watch:
                state = policy.feedback(state, layer, measured)
        times.append((watch.wall_s * 1e3, watch.cpu_s * 1e3))
    return times[3:]


def main() -> None:
    """Print one JSON object: median, spread and least ms a token for each policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", default="split", help="comma-separated names, or all")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--neurons", type=int, default=11008)
    parser.add_argument("--capacity", type=float, default=0.25)
    parser.add_argument("--density", type=float, default=0.12)
    parser.add_argument("--tokens", type=int, default=30)
    args = parser.parse_args()
    names = sorted(set(POLICIES) - {"oracle"}) if args.policies == "all" else args.policies.split(",")
    result: dict[str, dict[str, float]] = {}
    for name in names:
        times = token_ms(name, args.layers, args.neurons, args.capacity, args.density, args.tokens)
        result[name] = {}
        for prefix, column in zip(("", "cpu_"), zip(*times, strict=True), strict=True):
            quartiles = statistics.quantiles(column, n=4)
            result[name] |= {
                f"{prefix}median_ms": quartiles[1],
                f"{prefix}iqr_ms": quartiles[2] - quartiles[0],
                f"{prefix}min_ms": min(column),
            }
    surroundings = {"load_average": load_average(), "machine": facts()}
    print(json.dumps({**vars(args), **surroundings, "ms_per_token": result}, indent=1))


if __name__ == "__main__":
    main()
