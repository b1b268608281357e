"""Kairox's Algorithm 1: temporal activation momentum with one decay per layer that follows the bottleneck.

Source: the paper. It leaves alpha, the bounds of lambda and eps open; the defaults here are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kairox_jax.balancing.contract import Active, Costs, Plan, Prior, Resident, Shape, Times, as_share
from kairox_jax.balancing.ranking import best_first, exchange, top_mask

TAU_FILTERS = ("off", "admission", "literal")


@dataclass
class PaperState:
    """Scores float32 [L, F], decay [L], and the mean decay after each step."""

    scores: np.ndarray
    decay: np.ndarray
    capacity: np.ndarray
    trajectory: list[float] = field(default_factory=list)


class Paper:
    """S <- lambda S + (1 - lambda) A; the best C by S are the target.

    Args:
        decay: lambda at first, in [0, 1).
        alpha: lambda is multiplied by 1 + alpha where the link is the bottleneck, by 1 - alpha where the
            host is; 0 keeps it.
        min_decay, max_decay: bounds of lambda.
        tau_filter: candidates have S > tau = (1 - lambda) + eps. "literal": all others leave, as the
            algorithm reads; "admission": others are not loaded, but leave only for a load; "off": none.
            With lambda = 0 the filter is off.
        eps: of tau.
    """

    def __init__(
        self,
        decay: float = 0.5,
        alpha: float = 0.05,
        min_decay: float = 0.1,
        max_decay: float = 0.95,
        tau_filter: str = "off",
        eps: float = 0.02,
    ) -> None:
        if tau_filter not in TAU_FILTERS:
            raise ValueError(f"tau_filter {tau_filter!r}: choose one of {', '.join(TAU_FILTERS)}")
        if not 0 <= decay < 1 or not 0 <= min_decay <= max_decay < 1:
            raise ValueError(
                f"decay {decay}, min_decay {min_decay}, max_decay {max_decay}: need 0 <= min <= max < 1"
            )
        self.decay, self.alpha, self.bounds = decay, alpha, (min_decay, max_decay)
        self.tau_filter, self.eps = tau_filter, eps

    def init(self, shape: Shape, prior: Prior | None) -> PaperState:
        """Return the prior as scores, or none."""
        size = (shape.num_layers, shape.num_neurons)
        scores = np.zeros(size, np.float32) if prior is None else prior.astype(np.float32)
        return PaperState(scores, np.full(shape.num_layers, self.decay), shape.capacity)

    def plan(
        self, state: PaperState, layer: int, active: Active, resident: Resident, costs: Costs
    ) -> tuple[PaperState, Plan]:
        """Update the layer's scores and exchange towards the best C."""
        scores, decay = state.scores[layer], float(state.decay[layer])
        scores *= np.float32(decay)
        scores += as_share(active) * np.float32(1 - decay)
        slots = int(state.capacity[layer])
        if self.tau_filter == "off" or decay == 0:
            return state, exchange(top_mask(scores, slots, resident), resident, scores, costs)
        passed = scores > (1 - decay) + self.eps
        if self.tau_filter == "admission":
            kept = np.where(passed | resident, scores, np.float32(-1))
            target = top_mask(kept, slots, resident) & (passed | resident)
            return state, exchange(target, resident, scores, costs)
        target = top_mask(np.where(passed, scores, np.float32(-1)), slots, resident) & passed
        leaves = np.flatnonzero(resident & ~target)
        room = min(costs.max_moves, costs.free_slots + leaves.size)
        return state, Plan(best_first(np.flatnonzero(target & ~resident), scores)[:room], leaves)

    def feedback(self, state: PaperState, layer: int | None, times: Times) -> PaperState:
        """Move the layer's lambda: up when the link is the bottleneck, down when the host is."""
        if layer is None:
            state.trajectory.append(float(state.decay.mean()))
        elif times.io_ms > max(times.gpu_ms, times.cpu_ms):
            state.decay[layer] = min(state.decay[layer] * (1 + self.alpha), self.bounds[1])
        elif times.cpu_ms > max(times.gpu_ms, times.io_ms):
            state.decay[layer] = max(state.decay[layer] * (1 - self.alpha), min(self.bounds[0], self.decay))
        return state

    def report(self, state: PaperState) -> dict[str, float]:
        """Return the mean lambda."""
        return {"lambda": float(state.decay.mean())}
