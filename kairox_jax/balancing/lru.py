"""Least recently used: every active neuron is loaded, whoever was active longest ago leaves."""

from __future__ import annotations

import numpy as np

from kairox_jax.balancing.contract import Active
from kairox_jax.balancing.scored import ScoreCache


class LRU(ScoreCache):
    """Score = step of the last use; before any use, the prior (below 1) ranks."""

    def from_prior(self, prior: np.ndarray) -> np.ndarray:
        """Rank by the prior, below any use."""
        return prior * 0.99

    def update(self, scores: np.ndarray, active: Active, clock: int) -> None:
        """Stamp the active."""
        scores[active > 0] = clock
