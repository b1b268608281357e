"""Decayed activation counts whose update costs one pass: the weight grows instead of the table decaying."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kairox_jax.balancing.contract import Active, Prior, Shape

LARGEST_WEIGHT = 1e12  # a table is rescaled before float32 loses its small entries


@dataclass
class Momentum:
    """Expected activation of every neuron: ``table * factor(layer)``.

    Attributes:
        table: float32 [L, F], counts times ``weight``; updated in place.
        weight: [L], of the next step.
        total: [L], decayed number of steps that were counted.
        decay: share of a count that is left after a step, in (0, 1).
    """

    table: np.ndarray
    weight: np.ndarray
    total: np.ndarray
    decay: float

    def add(self, layer: int, share: Active, buffer: np.ndarray) -> None:
        """Count one step of a layer."""
        weight = self.weight[layer] / self.decay
        if weight > LARGEST_WEIGHT:
            self.table[layer] /= weight
            weight = 1.0
        self.weight[layer] = weight
        self.total[layer] = self.total[layer] * self.decay + 1.0
        np.multiply(share, np.float32(weight), out=buffer)
        self.table[layer] += buffer

    def factor(self, layer: int) -> float:
        """Return what turns a table entry into an expected activation in 0..1."""
        return 1.0 / (self.weight[layer] * self.total[layer])


def new_momentum(shape: Shape, prior: Prior | None, decay: float, prior_steps: float) -> Momentum:
    """Return the momentum in which the prior counts as ``prior_steps`` steps (half of all, without one)."""
    table = np.full((shape.num_layers, shape.num_neurons), 0.5, np.float32) if prior is None else prior
    return Momentum(
        (table * prior_steps).astype(np.float32),
        np.ones(shape.num_layers),
        np.full(shape.num_layers, prior_steps),
        decay,
    )
