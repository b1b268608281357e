"""PowerInfer's policy: the neurons that are hottest offline stay on the device for good."""

from __future__ import annotations

from kairox_jax.balancing.contract import NOTHING, Active, Costs, Plan, Prior, Resident, Shape, Times


class Static:
    """Residents are the hottest by the prior and never change."""

    def init(self, shape: Shape, prior: Prior | None) -> None:
        """Return no state."""

    def plan(
        self, state: None, layer: int, active: Active, resident: Resident, costs: Costs
    ) -> tuple[None, Plan]:
        """Move nothing."""
        return None, NOTHING

    def feedback(self, state: None, layer: int | None, times: Times) -> None:
        """Learn nothing."""
