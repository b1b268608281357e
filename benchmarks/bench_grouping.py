"""Time, memory and cohesion of grouping one layer of a large model, on a synthetic trace with planted groups."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.machine import facts, load_average
from training.grouping import group_layer, measure, split_rows


def planted_sets(
    rng: np.random.Generator, tokens: int, neurons: int, size: int, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return active sets [tokens, F] of groups that fire together, and the group of each neuron.

    A group is on with a frequency of its own (Beta, 10 % on average); each of its neurons misses a token of the
    group, or fires alone, with a small probability: like a ReLU model, about 12 % are active.
    """
    group_of = rng.permutation(np.repeat(np.arange(neurons // size), size))
    share = np.clip(rng.beta(0.6, 5.4, neurons // size), 0.005, 0.95)
    on = rng.random((tokens, neurons // size)) < share
    active = on[:, group_of]
    misses, alone = rng.random(active.shape) < noise, rng.random(active.shape) < noise / 10
    return (active & ~misses) | alone, group_of


def found_frac(groups: np.ndarray, group_of: np.ndarray) -> float:
    """Return the share of pairs within groups that are of one planted group."""
    planted = group_of[groups]
    pairs = planted[:, :, None] == planted[:, None, :]
    size = groups.shape[1]
    return float((pairs.sum() - groups.size) / (groups.size * (size - 1)))


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--neurons", type=int, default=11008)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=1, help="layers, each with a text of its own")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    seconds, rows = list[float](), list[dict[str, Any]]()
    for _ in range(args.repeats):
        active, group_of = planted_sets(rng, args.tokens, args.neurons, args.group_size, args.noise)
        fit, held_out = split_rows(args.tokens)
        fitted = active[fit]
        begin = time.perf_counter()
        groups, metis = group_layer(fitted, args.group_size)
        seconds.append(time.perf_counter() - begin)
        c = measure(fitted, active[held_out], groups, metis)
        parts = {"frequency": c.frequency, "metis": c.metis, "grouped": c.grouped}
        rows.append({name: round(value / c.random, 3) for name, value in parts.items()})
        rows[-1]["active_frac"] = round(float(active.mean()), 4)
        rows[-1]["planted_pairs_found"] = round(found_frac(groups, group_of), 4)
    result = {
        **vars(args),
        "machine": facts(),
        "load_average": load_average(),
        "seconds_a_layer": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "cohesion_over_random": rows,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
