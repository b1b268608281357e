"""llama.cpp's policy: the first layers wholly on the device, the rest wholly on the host."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int64

from kairox_jax.balancing.contract import NOTHING, Active, Costs, Plan, Prior, Resident, Shape, Times


class Layers:
    """Whole layers until the slots are used up; nothing ever moves."""

    dense = True  # the simulator times it as llama.cpp runs: every neuron, no predictor

    def share(
        self, total_slots: int, num_layers: int, num_neurons: int, prior: Prior | None
    ) -> Int64[np.ndarray, " L"]:
        """Give each of the first layers every slot that it needs."""
        whole = total_slots // num_neurons
        return np.where(np.arange(num_layers) < whole, num_neurons, 0).astype(np.int64)

    def initial(self, shape: Shape, prior: Prior | None) -> Bool[np.ndarray, "L F"]:
        """Return all neurons of the layers that fit as a whole; equal slots are pooled first."""
        slots = self.share(int(shape.capacity.sum()), shape.num_layers, shape.num_neurons, prior)
        whole = np.minimum(slots, shape.capacity) == shape.num_neurons
        return np.repeat(whole[:, None], shape.num_neurons, axis=1)

    def init(self, shape: Shape, prior: Prior | None) -> None:
        """Return no state."""

    def plan(
        self, state: None, layer: int, active: Active, resident: Resident, costs: Costs
    ) -> tuple[None, Plan]:
        """Move nothing."""
        return None, NOTHING

    def feedback(self, state: None, layer: int | None, times: Times) -> None:
        """Learn nothing."""
