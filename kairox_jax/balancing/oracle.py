"""A policy that knows the future: ``split`` with true discounted reuse in place of momentum.

Simulator only: the future is the trace's own later steps. Same window and link as everybody.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kairox_jax.balancing.contract import Active, Costs, Plan, Prior, Resident, Shape
from kairox_jax.balancing.split import Split, SplitState

HORIZON = 16  # steps looked ahead: at the default discount the rest weighs less than 2e-5


class Oracle(Split):
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

    def init(self, shape: Shape, prior: Prior | None) -> SplitState:
        """Look at the first steps."""
        self._step = -1
        self._ahead = [self._future(step) for step in range(HORIZON)]
        return super().init(shape, prior)

    def plan(
        self, state: SplitState, layer: int, active: Active, resident: Resident, costs: Costs
    ) -> tuple[SplitState, Plan]:
        """Look one step further at each first layer, then plan as ``split`` does."""
        if layer == 0:
            self._advance(state.momentum.table.shape)
        return super().plan(state, layer, active, resident, costs)

    def _expected(self, state: SplitState, layer: int) -> tuple[np.ndarray, float]:
        """Return the true discounted reuse."""
        return self._reuse[layer], 1.0

    def _advance(self, size: tuple[int, ...]) -> None:
        self._step += 1
        self._ahead = [*self._ahead[1:], self._future(self._step + HORIZON)]
        self._reuse = np.zeros(size, np.float32)
        for rows in reversed(self._ahead):
            self._reuse *= np.float32(self._discount)
            if rows is not None:
                self._reuse += rows * np.float32(1 - self._discount)
