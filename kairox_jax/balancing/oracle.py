"""A policy that knows the future: ``split`` with true discounted reuse in place of momentum.

Simulator only: the future is the trace's own later steps. Same window and link as everybody.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kairox_jax.balancing.contract import Active, Costs, Plan, Prior, Resident, Shape
from kairox_jax.balancing.split import Split, SplitState

HORIZON = 16  # steps looked ahead: at the default discount the rest weighs less than 2e-5


class Foretold(Split):
    """``split`` whose expected reuse comes from outside, by the number of the step that a layer's plan follows."""

    def init(self, shape: Shape, prior: Prior | None) -> SplitState:
        """Begin before the first step of each layer."""
        self._step = [-1] * shape.num_layers
        return super().init(shape, prior)

    def plan(
        self, state: SplitState, layer: int, active: Active, resident: Resident, costs: Costs
    ) -> tuple[SplitState, Plan]:
        """Plan as ``split`` does, one step later than the layer's last plan."""
        self._step[layer] += 1
        return super().plan(state, layer, active, resident, costs)


class Oracle(Foretold):
    """Ranks by sum of discount ** k * activation k + 1 steps ahead, as far as the trace reaches.

    Args:
        future: activation bool or float [L, F] of a step, or None beyond the last; steps count from 0.
        discount: weight of each further step, in (0, 1); 0.5 gave the least time of 0.5, 0.8 and 0.9.
    """

    def __init__(
        self, future: Callable[[int], np.ndarray | None] | None = None, discount: float = 0.5
    ) -> None:
        super().__init__(refit=False)
        if future is None:
            raise ValueError("policy 'oracle' needs the future: use it in kairox replay or compare")
        if not 0 < discount < 1:
            raise ValueError(f"discount {discount} must be in (0, 1)")
        self._future, self._discount = future, discount

    def _expected(self, state: SplitState, layer: int) -> tuple[np.ndarray, float]:
        """Return the true discounted reuse after the step whose activations the plan was given."""
        reuse = np.zeros(state.momentum.table.shape[1], np.float32)
        for step in range(self._step[layer] + HORIZON, self._step[layer], -1):
            reuse *= np.float32(self._discount)
            rows = self._future(step)
            if rows is not None:
                reuse += rows[layer] * np.float32(1 - self._discount)
        return reuse, 1.0
