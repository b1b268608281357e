"""Expected activation of every neuron: decayed counts over the offline prior.

The weight of a step grows instead of the table fading, so that an update adds and a choice only looks up.
Whole activations are counted in bytes and reach the table a few steps at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, UInt8

from kairox_jax.balancing.contract import Active, Prior, Shape

LARGEST_WEIGHT = 1e6  # then a table is rescaled: float32 keeps 7 digits
BLOCK = 4  # steps that reach the table together: a pass over float32 costs ten of one over bytes


@dataclass
class Momentum:
    """Decayed activation counts; ``table[layer] * factor(layer)`` is the expected activation, 0..1.

    Attributes:
        table: float32 [L, F], counts times the weight of their step; updated in place.
        weight: of the last step, for each layer.
        total: decayed number of steps, the prior's included, for each layer.
        decay: share of a count that is left after a step, in (0, 1).
        buffer: float32 [F], for one update.
        recent: uint8 [L, F], activations of the steps that have not reached the table.
        pending: the number of those steps, for each layer.
    """

    table: Float32[np.ndarray, "L F"]
    weight: list[float]
    total: list[float]
    decay: float
    buffer: Float32[np.ndarray, " F"]
    recent: UInt8[np.ndarray, "L F"]
    pending: list[int]

    def add(self, layer: int, active: Active) -> None:
        """Count one step of a layer: shares at once, whole activations with the others of their block."""
        if active.dtype == bool:
            row = self.recent[layer]
            row += active.view(np.uint8)
            self.pending[layer] += 1
            if self.pending[layer] == BLOCK:
                self._fold(layer)
            return
        self._fold(layer)
        self._add(layer, active, 1)

    def _fold(self, layer: int) -> None:
        """Bring what was counted in bytes into the table."""
        if self.pending[layer]:
            self._add(layer, self.recent[layer], self.pending[layer])
            self.recent[layer] = self.pending[layer] = 0

    def _add(self, layer: int, counts: np.ndarray, steps: int) -> None:
        faded = self.decay**steps
        weight = self.weight[layer] / faded
        if weight > LARGEST_WEIGHT:
            self.table[layer] /= np.float32(weight)
            weight = 1.0
        self.weight[layer] = weight
        self.total[layer] = self.total[layer] * faded + steps
        np.copyto(self.buffer, counts)  # casting and multiplying at once takes half as long again
        self.buffer *= np.float32(weight)
        row = self.table[layer]
        row += self.buffer

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
        np.zeros((shape.num_layers, shape.num_neurons), np.uint8),
        [0] * shape.num_layers,
    )
