"""The C neurons with the largest activation share of this step, without memory (the paper's Top-K)."""

from __future__ import annotations

import numpy as np

from kairox_jax.balancing.contract import Active, as_share
from kairox_jax.balancing.scored import ScoreCache


class TopK(ScoreCache):
    """Score = this step's activation; the host takes what does not arrive in time."""

    def update(self, scores: np.ndarray, active: Active, clock: int) -> None:
        """Forget the past."""
        scores[:] = as_share(active)


class EagerLambda0(TopK):
    """The paper's stand-in for Neuralink: its own system with lambda = 0 and no adaptation."""
