"""PowerInfer's policy: the neurons that are hottest offline stay on the device for good."""

from __future__ import annotations

from importlib import import_module

import numpy as np
from jaxtyping import Float64, Int64

from kairox_jax.balancing.contract import NOTHING, Active, Costs, Plan, Prior, Resident, Shape, Times

SOLVERS = ("equal", "released", "paper")


class Static:
    """Residents are the hottest by the prior and never change.

    Args:
        solver: how slots are shared out among layers. "equal": the same for each; "released": the hottest
            blocks of all layers together, as the published solver comes out; "paper": its linear program, in
            which a layer has no slot or at least ``min_slots`` (needs scipy). Without a prior: equal.
        block: neurons of similar frequency that are decided together (the paper: 64; published: 256).
        min_slots: C_l = T_sync / (T_cpu - T_gpu), from which on the device is worth a layer's while.
        time_limit_s: of the program's solver.
    """

    def __init__(
        self, solver: str = "equal", block: int = 64, min_slots: int = 0, time_limit_s: float = 30.0
    ) -> None:
        if solver not in SOLVERS:
            raise ValueError(f"solver {solver!r}: choose one of {', '.join(SOLVERS)}")
        if block < 1 or min_slots < 0 or not time_limit_s > 0:
            raise ValueError(
                f"block {block} >= 1, min_slots {min_slots} >= 0, time_limit_s {time_limit_s} > 0"
            )
        self.solver, self.block, self.min_slots, self.time_limit_s = solver, block, min_slots, time_limit_s

    def share(
        self, total_slots: int, num_layers: int, num_neurons: int, prior: Prior | None
    ) -> Int64[np.ndarray, " L"]:
        """Return the slots of each layer."""
        if self.solver == "equal" or prior is None:
            base, extra = divmod(total_slots, num_layers)
            return base + (np.arange(num_layers) < extra).astype(np.int64)
        values = self._block_values(prior)
        sizes = np.full(values.shape[1], self.block, np.int64)
        sizes[-1] = num_neurons - self.block * (values.shape[1] - 1)
        if self.solver == "released":
            chosen = np.zeros(values.shape, bool)
            order = np.argsort(-values, axis=None, kind="stable")
            fits = np.cumsum(np.broadcast_to(sizes, values.shape).ravel()[order]) <= total_slots
            chosen.ravel()[order[fits]] = True
        else:
            chosen = self._solve(values, sizes, total_slots)
        return (chosen * sizes).sum(1)

    def _block_values(self, prior: Prior) -> Float64[np.ndarray, "L b"]:
        """Return the summed frequency of each layer's blocks, hottest first."""
        ranked = -np.sort(-prior.astype(np.float64), axis=1)
        return np.add.reduceat(ranked, np.arange(0, prior.shape[1], self.block), axis=1)

    def _solve(self, values: np.ndarray, sizes: np.ndarray, total_slots: int) -> np.ndarray:
        """Solve: max value, slots within the budget, a layer's slots 0 or at least ``min_slots``."""
        try:
            optimize = import_module("scipy.optimize")
            sparse = import_module("scipy.sparse")
        except ImportError:
            raise ValueError(
                "static solver=paper needs scipy: pip install scipy, or solver=released"
            ) from None
        layers, blocks = values.shape
        per_layer = sparse.kron(sparse.eye(layers), sizes[None].astype(float))  # [L, L * b]
        used = sparse.eye(layers)
        rows = sparse.vstack(
            [
                sparse.csr_matrix(np.concatenate([np.tile(sizes, layers), np.zeros(layers)])[None]),
                sparse.hstack([per_layer, -float(self.min_slots) * used]),
                sparse.hstack([per_layer, -float(sizes.sum()) * used]),
            ]
        )
        low = np.concatenate([[0.0], np.zeros(layers), np.full(layers, -np.inf)])
        high = np.concatenate([[float(total_slots)], np.full(layers, np.inf), np.zeros(layers)])
        result = optimize.milp(
            np.concatenate([-values.ravel(), np.zeros(layers)]),
            integrality=np.ones(values.size + layers),
            bounds=optimize.Bounds(0, 1),
            constraints=optimize.LinearConstraint(rows, low, high),
            options={"time_limit": self.time_limit_s},
        )
        if result.x is None:
            raise ValueError(f"static solver=paper found nothing ({result.message}): raise time_limit_s")
        return result.x[: values.size].reshape(layers, blocks) > 0.5

    def init(self, shape: Shape, prior: Prior | None) -> None:
        """Return no state."""

    def plan(
        self, state: None, layer: int, active: Active, resident: Resident, costs: Costs
    ) -> tuple[None, Plan]:
        """Move nothing."""
        return None, NOTHING

    def feedback(self, state: None, layer: int | None, times: Times) -> None:
        """Learn nothing."""
