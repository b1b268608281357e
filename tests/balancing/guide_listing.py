"""The guide's listing, written anew from its text with sets and loops: a reference for tests only."""

from __future__ import annotations

import numpy as np


class GuideListing:
    """Momentum in float32, residents as sets, the modifier as a Python float."""

    def __init__(self, num_layers: int, num_neurons: int, slots: int) -> None:
        self.scores = [np.zeros(num_neurons, np.float32) for _ in range(num_layers)]
        self.resident: list[set[int]] = [set() for _ in range(num_layers)]
        self.slots = slots
        self.modifier = 1.0

    def layer(self, layer: int, active: list[int]) -> tuple[list[int], list[int], int]:
        """Return promotions (best first), evictions and hits of one layer."""
        scores, resident = self.scores[layer], self.resident[layer]
        boost = np.float32(1.0 - 0.90)
        for neuron in range(scores.size):
            scores[neuron] = np.float32(scores[neuron] * np.float32(0.90))
        for neuron in active:
            scores[neuron] = np.float32(scores[neuron] + boost)
        evicted = [n for n in sorted(resident) if scores[n] < np.float32(0.08)]
        resident -= set(evicted)
        threshold = np.float32(0.35 * self.modifier)
        waiting = [n for n in range(scores.size) if n not in resident and scores[n] >= threshold]
        promoted = sorted(waiting, key=lambda n: (-scores[n], n))[: max(self.slots - len(resident), 0)]
        resident |= set(promoted)
        return promoted, evicted, sum(n in resident for n in active)

    def step(self, active: list[list[int]]) -> dict:
        """Return what one token does in all layers together, by the guide's cost model."""
        rows = [self.layer(layer, ids) for layer, ids in enumerate(active)]
        hits = sum(row[2] for row in rows)
        misses = sum(len(ids) for ids in active) - hits
        gpu, io, cpu = 8.5 + 0.0008 * hits, 0.0018 * sum(len(row[0]) for row in rows), 0.015 * misses
        if cpu > max(gpu, io):
            self.modifier = max(0.40, self.modifier - 0.05 * (cpu - max(gpu, io)) / cpu)
        elif io > gpu:
            self.modifier = min(2.00, self.modifier + 0.08 * (io - gpu) / io)
        return {
            "promoted": [row[0] for row in rows],
            "evicted": [row[1] for row in rows],
            "hits": hits,
            "residual": misses,
            "times": (gpu, io, cpu),
            "modifier": self.modifier,
        }


def demonstration() -> list[list[list[int]]]:
    """Return the active ids [10 steps][4 layers] of the guide's own run."""
    state = np.random.RandomState(42)
    steps = []
    for _ in range(10):
        noise = state.choice(range(300, 4000), size=30, replace=False)
        steps.append([[*range(100, 250), *noise.tolist()]] * 4)
    return steps
