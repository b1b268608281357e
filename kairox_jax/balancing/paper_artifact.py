"""What Kairox's published code does: a fixed decay, and a cap on swaps per layer that adapts instead."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from kairox_jax.balancing.contract import Active, Costs, Plan, Prior, Resident, Shape, Times, as_share
from kairox_jax.balancing.ranking import top_mask


@dataclass
class ArtifactState:
    """Scores float32 [L, F] and the cap on swaps [L]."""

    scores: np.ndarray
    cap: np.ndarray
    capacity: np.ndarray


class PaperArtifact:
    """S <- 0.67 S + 0.33 A; loads and evictions of the best C are paired by ascending index, up to a cap.

    Args:
        decay: lambda.
        cap: swaps per layer and step at first.
        alpha: the cap shrinks by this share where the link is the bottleneck and grows where the host is.
    """

    def __init__(self, decay: float = 0.67, cap: int = 16, alpha: float = 0.1) -> None:
        if not 0 <= decay < 1 or cap < 1:
            raise ValueError(f"decay {decay} must be in [0, 1) and cap {cap} at least 1")
        self.decay, self.cap, self.alpha = decay, cap, alpha

    def initial(self, shape: Shape, prior: Prior | None) -> Bool[np.ndarray, "L F"]:
        """Return the first C neurons of each layer, as the artifact starts."""
        return np.arange(shape.num_neurons)[None] < shape.capacity[:, None]

    def init(self, shape: Shape, prior: Prior | None) -> ArtifactState:
        """Return no scores and the first cap."""
        scores = np.zeros((shape.num_layers, shape.num_neurons), np.float32)
        return ArtifactState(scores, np.full(shape.num_layers, float(self.cap)), shape.capacity)

    def plan(
        self, state: ArtifactState, layer: int, active: Active, resident: Resident, costs: Costs
    ) -> tuple[ArtifactState, Plan]:
        """Exchange towards the best C, in index order."""
        scores = state.scores[layer]
        scores *= np.float32(self.decay)
        scores += as_share(active) * np.float32(1 - self.decay)
        target = top_mask(scores, int(state.capacity[layer]), resident)
        loads, leaves = np.flatnonzero(target & ~resident), np.flatnonzero(resident & ~target)
        room = min(loads.size, costs.max_moves, costs.free_slots + leaves.size, int(state.cap[layer]))
        return state, Plan(loads[:room], leaves[: max(room - costs.free_slots, 0)])

    def feedback(self, state: ArtifactState, layer: int | None, times: Times) -> ArtifactState:
        """Move the layer's cap with the bottleneck."""
        if layer is not None:
            if times.io_ms > max(times.gpu_ms, times.cpu_ms):
                state.cap[layer] = max(state.cap[layer] * (1 - self.alpha), 1.0)
            elif times.cpu_ms > max(times.gpu_ms, times.io_ms):
                state.cap[layer] = min(state.cap[layer] * (1 + self.alpha), state.scores.shape[1])
        return state

    def report(self, state: ArtifactState) -> dict[str, float]:
        """Return the mean cap."""
        return {"cap": float(state.cap.mean())}
