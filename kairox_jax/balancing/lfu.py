"""Least frequently used: the neurons with the largest activation counts stay."""

from __future__ import annotations

import numpy as np

from kairox_jax.balancing.contract import Active, as_share
from kairox_jax.balancing.scored import ScoreCache


class LFU(ScoreCache):
    """Score = activations so far, the prior counted as ``prior_steps`` steps.

    Args:
        prior_steps: steps that the prior stands for.
    """

    def __init__(self, prior_steps: float = 16.0) -> None:
        if prior_steps < 0:
            raise ValueError(f"prior_steps {prior_steps} must be 0 or more")
        self.prior_steps = prior_steps

    def from_prior(self, prior: np.ndarray) -> np.ndarray:
        """Count the prior as steps."""
        return prior * self.prior_steps

    def update(self, scores: np.ndarray, active: Active, clock: int) -> None:
        """Count the active."""
        scores += as_share(active)
