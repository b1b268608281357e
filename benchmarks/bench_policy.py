"""Host time of a policy's plan and feedback for one token, at a large model's shape."""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from kairox_jax.balancing import POLICIES, Costs, Shape, Times, initial_residents, make_policy


def token_ms(
    name: str, layers: int, neurons: int, capacity: float, density: float, tokens: int
) -> list[float]:
    """Return the ms that plan and feedback of all layers took, for each token after three warm-up tokens."""
    rng = np.random.default_rng(0)
    prior = rng.beta(0.4, 1.6, (layers, neurons)).astype(np.float32)
    prior *= density / prior.mean()
    shape, policy = Shape(layers, neurons, int(capacity * neurons)), make_policy(name)
    state, resident = policy.init(shape, prior), initial_residents(policy, shape, prior)
    times = []
    for _ in range(tokens + 3):
        active = rng.random((layers, neurons)) < prior
        spent = 0.0
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
            begin = time.perf_counter()
            state, plan = policy.plan(state, layer, active[layer], resident[layer], costs)
            spent += time.perf_counter() - begin
            resident[layer, plan.evict], resident[layer, plan.load] = False, True
            left, loads = np.count_nonzero(active[layer] & ~resident[layer]), plan.load.size
            io_ms = costs.link_ms_fixed + costs.link_ms_per_record * loads if loads else 0.0
            measured = Times(0.2, io_ms, costs.cpu_ms_per_record * left)
            begin = time.perf_counter()
            state = policy.feedback(state, layer, measured)
            spent += time.perf_counter() - begin
        times.append(spent * 1e3)
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
    result = {}
    for name in names:
        times = token_ms(name, args.layers, args.neurons, args.capacity, args.density, args.tokens)
        quartiles = statistics.quantiles(times, n=4)
        result[name] = {
            "median_ms": quartiles[1],
            "iqr_ms": quartiles[2] - quartiles[0],
            "min_ms": min(times),
        }
    print(json.dumps({**vars(args), "ms_per_token": result}, indent=1))


if __name__ == "__main__":
    main()
