"""Expected activation of every neuron from decayed counts at two time scales over the offline prior.

Recent steps are summed apart and folded into the decayed table every few steps: a step then costs one
short pass, not several.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int

from kairox_jax.balancing.contract import Active, Prior, Shape

FOLD_STEPS = 4  # steps that are summed before they enter the table; also the span of the short scale


@dataclass
class Momentum:
    """Decayed activation counts; all arrays are updated in place.

    Attributes:
        table: float32 [L, F], decayed counts of the steps before the recent ones.
        recent: [L, F] sums of at most ``FOLD_STEPS`` recent steps: uint8, or float32 once shares come.
        steps: [L], steps seen.
        total: [L], decayed number of steps in the table, the prior's included.
        decay: of a step, in (0, 1).
    """

    table: Float32[np.ndarray, "L F"]
    recent: np.ndarray
    steps: list[int]
    total: list[float]
    decay: float

    def add(self, layer: int, active: Active) -> None:
        """Count one step of a layer."""
        if active.dtype != bool and self.recent.dtype == np.uint8:
            self.recent = self.recent.astype(np.float32)
        recent = self.recent[layer]
        np.add(recent, active.view(np.uint8) if active.dtype == bool else active, out=recent)
        self.steps[layer] += 1
        if (self.steps[layer] + layer) % FOLD_STEPS == 0:  # layers take turns: no step pays for all
            self._fold(layer)

    def _fold(self, layer: int) -> None:
        table, recent = self.table[layer], self.recent[layer]
        fade = self.decay**FOLD_STEPS
        table *= np.float32(fade)
        table += recent
        recent[:] = 0
        self.total[layer] = self.total[layer] * fade + FOLD_STEPS

    def at(self, layer: int, ids: Int[np.ndarray, " n"], recent_weight: float) -> Float32[np.ndarray, " n"]:
        """Return the expected activation of some neurons of a layer, about 0..1.

        Args:
            layer: 0..L-1.
            ids: neurons.
            recent_weight: how much more one of the recent steps counts than an older one.
        """
        scale = 1.0 / (self.total[layer] + FOLD_STEPS * recent_weight)
        value = self.table[layer].take(ids)
        value *= np.float32(scale)
        value += self.recent[layer].take(ids) * np.float32(scale * recent_weight)
        return value


def new_momentum(shape: Shape, prior: Prior | None, decay: float, prior_steps: float) -> Momentum:
    """Return the momentum in which the prior (one half without one) counts as ``prior_steps`` steps."""
    size = (shape.num_layers, shape.num_neurons)
    share = np.full(size, 0.5, np.float32) if prior is None else prior
    return Momentum(
        (share * prior_steps).astype(np.float32),
        np.zeros(size, np.uint8),
        [0] * shape.num_layers,
        [float(prior_steps)] * shape.num_layers,
        decay,
    )
