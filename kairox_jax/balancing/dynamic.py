"""DynamicInfer's rule: value = activation now + weight * past frequency, greedily within the window.

Source: its summary only; weight and pinned share are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kairox_jax.balancing.contract import Active, Costs, Plan, Prior, Resident, Shape, Times, as_share
from kairox_jax.balancing.ranking import exchange, loads_in_window, top_mask


@dataclass
class DynamicState:
    """Counts [L, F], what they are counted over [L], slots [L] and who is pinned [L, F]."""

    counts: np.ndarray
    steps: np.ndarray
    capacity: np.ndarray
    pinned: np.ndarray


class Dynamic:
    """The hottest by the prior are pinned; the other slots follow v = a + weight * f.

    Args:
        weight: of past frequency.
        pinned: share of the slots that never change.
        prior_steps: steps that the prior stands for.
    """

    def __init__(self, weight: float = 0.5, pinned: float = 0.5, prior_steps: float = 16.0) -> None:
        if weight < 0 or not 0 <= pinned <= 1 or prior_steps <= 0:
            raise ValueError(
                f"weight {weight} >= 0, pinned {pinned} in [0, 1], prior_steps {prior_steps} > 0"
            )
        self.weight, self.pinned, self.prior_steps = weight, pinned, prior_steps

    def init(self, shape: Shape, prior: Prior | None) -> DynamicState:
        """Pin the hottest of the prior; without one, nothing."""
        size = (shape.num_layers, shape.num_neurons)
        counts, pinned = np.zeros(size, np.float32), np.zeros(size, bool)
        if prior is not None:
            counts += (prior * self.prior_steps).astype(np.float32)
            for layer, slots in enumerate(shape.capacity):
                best = np.argsort(-prior[layer], kind="stable")[: int(slots * self.pinned)]
                pinned[layer, best] = True
        return DynamicState(counts, np.full(shape.num_layers, self.prior_steps), shape.capacity, pinned)

    def plan(
        self, state: DynamicState, layer: int, active: Active, resident: Resident, costs: Costs
    ) -> tuple[DynamicState, Plan]:
        """Exchange towards the best values, as many as the window takes."""
        share = as_share(active)
        state.counts[layer] += share
        state.steps[layer] += 1
        value = share + np.float32(self.weight) * state.counts[layer] / np.float32(state.steps[layer])
        value[state.pinned[layer]] += np.float32(1e6)
        target = top_mask(value, int(state.capacity[layer]), resident)
        return state, exchange(target, resident, value, costs, loads_in_window(costs))

    def feedback(self, state: DynamicState, layer: int | None, times: Times) -> DynamicState:
        """Learn nothing from times."""
        return state
