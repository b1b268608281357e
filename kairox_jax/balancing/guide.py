"""The guide's policy: temporal activation momentum, two thresholds, and its balancer (ANB).

Source: the guide's TemporalActivationMomentumCache and AdaptiveNeuronBalancer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from kairox_jax.balancing.contract import Active, Costs, Plan, Prior, Resident, Shape, Times, as_share

ETA_UP, ETA_DOWN = 0.05, 0.08
MIN_MODIFIER, MAX_MODIFIER = 0.40, 2.00


@dataclass
class GuideState:
    """Momentum float32 [L, F] (updated in place) and the one modifier of the promotion threshold."""

    momentum: Float32[np.ndarray, "L F"]
    modifier: float = 1.0


def balance(modifier: float, times: Times) -> float:
    """Return the modifier after one step of the ANB.

    No division by zero: a time that divides is larger than another one that is not negative.
    """
    delta = times.cpu_ms - max(times.gpu_ms, times.io_ms)
    if delta > 0:
        return max(MIN_MODIFIER, modifier - ETA_UP * delta / times.cpu_ms)
    if times.io_ms > times.gpu_ms:
        return min(MAX_MODIFIER, modifier + ETA_DOWN * (times.io_ms - times.gpu_ms) / times.io_ms)
    return modifier


NONE = np.empty(0, np.int32)


class Guide:
    """M <- beta M + (1 - beta) a; evict M < evict threshold; promote M >= promote threshold * modifier.

    Args:
        beta: momentum kept per step, in [0, 1).
        promote_threshold: in (0, 1].
        evict_threshold: in [0, promote_threshold].
        anb: let the times of each step move the modifier.
        warm_start: start with the prior's hottest neurons in the slots and the prior as momentum, instead
            of empty slots and no momentum, as the guide does.
    """

    def __init__(
        self,
        beta: float = 0.90,
        promote_threshold: float = 0.35,
        evict_threshold: float = 0.08,
        anb: bool = True,
        warm_start: bool = False,
    ) -> None:
        if not 0 <= beta < 1:
            raise ValueError(f"beta {beta} must be in [0, 1); the guide's is 0.90")
        if not 0 < promote_threshold <= 1:
            raise ValueError(f"promote_threshold {promote_threshold} must be in (0, 1]; the guide's is 0.35")
        if not 0 <= evict_threshold <= promote_threshold:
            raise ValueError(
                f"evict_threshold {evict_threshold} must be in [0, {promote_threshold}], "
                "the promotion threshold"
            )
        self.beta, self.anb, self.warm_start = float(beta), anb, warm_start
        self.promote_threshold, self.evict_threshold = float(promote_threshold), float(evict_threshold)

    def init(self, shape: Shape, prior: Prior | None) -> GuideState:
        """Return no momentum, or the prior's with ``warm_start``."""
        if self.warm_start and prior is not None:
            return GuideState(prior.astype(np.float32))
        return GuideState(np.zeros((shape.num_layers, shape.num_neurons), np.float32))

    def plan(
        self, state: GuideState, layer: int, active: Active, resident: Resident, costs: Costs
    ) -> tuple[GuideState, Plan]:
        """Update the layer's momentum, evict what went stale, promote the best into free slots only."""
        momentum = state.momentum[layer]
        momentum *= self.beta
        momentum += as_share(active) * np.float32(1.0 - self.beta)
        evict = np.flatnonzero(resident & (momentum < self.evict_threshold))
        room = min(costs.free_slots + evict.size, costs.max_moves)
        if room == 0:
            return state, Plan(NONE, evict)
        promotable = momentum >= self.promote_threshold * state.modifier
        candidates = np.flatnonzero(promotable & ~resident)
        order = np.argsort(-momentum[candidates], kind="stable")  # ties: ascending index
        return state, Plan(candidates[order[:room]], evict)

    def feedback(self, state: GuideState, layer: int | None, times: Times) -> GuideState:
        """Adapt the modifier once a step; times of single layers are not used."""
        if layer is None and self.anb:
            state.modifier = balance(state.modifier, times)
        return state

    def report(self, state: GuideState) -> dict[str, float]:
        """Return the modifier and the sum of all momentum."""
        return {"modifier": state.modifier, "momentum_sum": float(state.momentum.sum(dtype=np.float64))}
