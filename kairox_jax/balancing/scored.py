"""Classic caches as scores: the C neurons with the best score are the target at every step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kairox_jax.balancing.contract import Active, Costs, Plan, Prior, Resident, Shape, Times
from kairox_jax.balancing.ranking import exchange, top_mask


@dataclass
class ScoreState:
    """Scores [L, F], slots [L] and the steps seen by each layer."""

    scores: np.ndarray
    capacity: np.ndarray
    clock: np.ndarray


class ScoreCache:
    """A cache whose target is the C best scores; ``update`` says what a score is."""

    def init(self, shape: Shape, prior: Prior | None) -> ScoreState:
        """Return the first scores."""
        size = (shape.num_layers, shape.num_neurons)
        scores = np.zeros(size, np.float32) if prior is None else self.from_prior(prior).astype(np.float32)
        return ScoreState(scores, shape.capacity, np.zeros(shape.num_layers, np.int64))

    def from_prior(self, prior: np.ndarray) -> np.ndarray:
        """Return the scores that a prior stands for."""
        return np.zeros_like(prior)

    def update(self, scores: np.ndarray, active: Active, clock: int) -> None:
        """Change one layer's scores in place after an activation."""
        raise NotImplementedError

    def plan(
        self, state: ScoreState, layer: int, active: Active, resident: Resident, costs: Costs
    ) -> tuple[ScoreState, Plan]:
        """Update the scores and exchange towards the best C."""
        state.clock[layer] += 1
        scores = state.scores[layer]
        self.update(scores, active, int(state.clock[layer]))
        target = top_mask(scores, int(state.capacity[layer]), resident)
        return state, exchange(target, resident, scores, costs)

    def feedback(self, state: ScoreState, layer: int | None, times: Times) -> ScoreState:
        """Learn nothing from times."""
        return state
