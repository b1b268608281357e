"""Expected activation of every neuron: decayed counts over the offline prior.

The weight of a step grows instead of the table fading, so that an update adds and a choice only looks up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int

from kairox_jax.balancing.contract import Active, Prior, Shape

LARGEST_WEIGHT = 1e6  # then a table is rescaled: float32 keeps 7 digits


@dataclass
class Momentum:
    """Decayed activation counts; ``table[layer] * factor(layer)`` is the expected activation, 0..1.

    Attributes:
        table: float32 [L, F], counts times the weight of their step; updated in place.
        weight: of the last step, for each layer.
        total: decayed number of steps, the prior's included, for each layer.
        decay: share of a count that is left after a step, in (0, 1).
        buffer: float32 [F], for a step of shares.
    """

    table: Float32[np.ndarray, "L F"]
    weight: list[float]
    total: list[float]
    decay: float
    buffer: Float32[np.ndarray, " F"]

    def add(self, layer: int, active: Active) -> None:
        """Count one step of a layer."""
        weight = self._next_weight(layer)
        np.multiply(active, np.float32(weight), out=self.buffer)
        row = self.table[layer]
        row += self.buffer

    def add_ids(self, layer: int, ids: Int[np.ndarray, " n"]) -> None:
        """Count one step of a layer whose active neurons are ``ids``: touches those only."""
        weight = np.float32(self._next_weight(layer))
        row = self.table[layer]
        row[ids] = row.take(ids) + weight

    def _next_weight(self, layer: int) -> float:
        weight = self.weight[layer] / self.decay
        if weight > LARGEST_WEIGHT:
            self.table[layer] /= np.float32(weight)
            weight = 1.0
        self.weight[layer] = weight
        self.total[layer] = self.total[layer] * self.decay + 1.0
        return weight

    def factor(self, layer: int) -> float:
        """Return what turns a table entry into an expected activation."""
        return 1.0 / (self.weight[layer] * self.total[layer])


def new_momentum(shape: Shape, prior: Prior | None, decay: float, prior_steps: float) -> Momentum:
    """Return the momentum in which the prior (one half without one) counts as ``prior_steps`` steps."""
    share = np.full((shape.num_layers, shape.num_neurons), 0.5, np.float32) if prior is None else prior
    return Momentum(
        (share * prior_steps).astype(np.float32),
        [1.0] * shape.num_layers,
        [float(prior_steps)] * shape.num_layers,
        decay,
        np.empty(shape.num_neurons, np.float32),
    )
