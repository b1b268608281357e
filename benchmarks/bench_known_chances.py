"""How far a policy gets that is told every neuron's true chance to fire, on generated traces; JSON out.

No policy that sees activations alone can foresee better: what it lacks to the bound and to ``oracle`` is chance.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np

from benchmarks.bench_gap import serve
from benchmarks.machine import facts
from benchmarks.offline_bound import offline_bound
from benchmarks.spread import spread
from kairox_jax.balancing import Policy, Shape, Split, Static, initial_residents, table
from kairox_jax.balancing.oracle import Foretold
from kairox_jax.balancing.split import SplitState
from kairox_jax.sim import ReplaySettings, Trace, replay
from kairox_jax.sim.generate import GeneratorSettings, generate, hidden_parts

SETTINGS, PRICE, MAX_LOADS, NET_CAPACITY = GeneratorSettings(), 1.5, 16, 0.3
HORIZONS = (2, 10)  # steps over which chances are averaged: for the time a token, for net hits


def chances(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]], horizon: int) -> list[np.ndarray]:
    """Return the mean chance of the next ``horizon`` steps after each step, float32 [L, F]."""
    found = []
    for popularity, drift, burst in parts:
        total = np.zeros_like(popularity)
        for ahead in range(1, horizon + 1):
            slow, fast = SETTINGS.drift_decay**ahead, SETTINGS.burst_decay**ahead
            log_odds = popularity + SETTINGS.drift * slow * drift + SETTINGS.burst * fast * burst
            total += 1 / (1 + np.exp(-log_odds))
        found.append((total / horizon).astype(np.float32))
    return found


class Told(Foretold):
    """``split`` with the true chances in place of momentum."""

    def __init__(self, chances: list[np.ndarray], price: float = 0.0) -> None:
        super().__init__(price=price, refit=False)
        self._chances = chances

    def _expected(self, state: SplitState, layer: int) -> tuple[np.ndarray, float]:
        return self._chances[self._step[layer]][layer], 1.0


def gap_closed(profile: Trace, trace: Trace, told: list[np.ndarray]) -> dict[str, float]:
    """Return the share of the gap between ``static`` and the offline bound in net hits."""
    active = np.stack([trace.active(step) for step in range(trace.num_steps)])
    prior, slots = profile.frequencies(), int(NET_CAPACITY * trace.num_neurons)
    first = initial_residents(Static(), Shape(trace.num_layers, trace.num_neurons, slots), prior)

    def net(policy: Policy) -> float:
        hits, loads = serve(policy, active, prior, slots, MAX_LOADS)
        return hits - PRICE * loads

    least = net(Static())
    gap = -least + sum(
        offline_bound(
            active[:, layer], first[layer], slots=slots, load_price=PRICE, max_loads=MAX_LOADS, iterations=100
        )
        for layer in range(trace.num_layers)
    )
    policies = {"split:price=1.5": Split(price=PRICE), "told": Told(told, price=PRICE)}
    return {name: (net(policy) - least) / gap for name, policy in policies.items()}


def over_oracle(
    profile: Trace, trace: Trace, told: list[np.ndarray], hardware: str, capacity: float
) -> dict[str, float]:
    """Return the time a token over that of ``oracle``."""
    ms = {}
    for name in ("paper", "split", "told", "oracle"):
        settings = ReplaySettings(
            policy=name,
            params={"chances": told} if name == "told" else {},
            hardware=hardware,
            capacity=capacity,
            as_model="llama-13b",
        )
        ms[name] = replay([trace], settings, [profile.frequencies()]).totals()["ms_per_token"]
    return {name: ms[name] / ms["oracle"] for name in ("paper", "split", "told")}


def main() -> None:
    """Print one JSON object; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="replayed; as many before are the profile")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--neurons", type=int, default=1536)
    args = parser.parse_args()
    table.POLICIES["told"] = Told
    runs: dict[str, dict[str, list[float]]] = {}
    for seed in range(args.seeds):
        size: dict[str, Any] = {
            "num_layers": args.layers,
            "num_neurons": args.neurons,
            "num_steps": 2 * args.steps,
            "seed": seed,
        }
        whole, parts = generate(SETTINGS, **size), hidden_parts(SETTINGS, **size)[args.steps :]
        profile, trace = whole.cut(slice(0, args.steps)), whole.cut(slice(args.steps, None))
        results = {"gap closed": gap_closed(profile, trace, chances(parts, HORIZONS[1]))}
        for hardware in ("pc-low", "pc-high", "rtx4070-pcie4", "rtx3060-pcie3"):
            for capacity in (0.25, 0.4):
                told = chances(parts, HORIZONS[0])
                results[f"time over oracle, {hardware}, {capacity}"] = over_oracle(
                    profile, trace, told, hardware, capacity
                )
        for name, values in results.items():
            print(f"seed {seed}, {name}: {values}", file=sys.stderr)
            for policy, value in values.items():
                runs.setdefault(name, {}).setdefault(policy, []).append(value)
    summary = {
        name: {policy: spread(values) for policy, values in policies.items()}
        for name, policies in runs.items()
    }
    print(json.dumps({**vars(args), "machine": facts(), "result": summary}, indent=1))


if __name__ == "__main__":
    main()
