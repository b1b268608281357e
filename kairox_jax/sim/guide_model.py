"""The guide's own cost model: one time for device, link and host per token, all layers together.

A promotion counts, and serves, in the step in which it is decided. Source: the guide's simulate_token_step.
"""

from __future__ import annotations

import numpy as np

from kairox_jax.balancing import Costs, Policy, Shape, Times, check_plan
from kairox_jax.sim.events import Cache, StepRecord

GPU_MS_FIXED, GPU_MS_PER_HIT = 8.5, 0.0008
LINK_MS_PER_PROMOTION, CPU_MS_PER_RESIDUAL = 0.0018, 0.015


class GuideModel:
    """Runs one policy over steps; the interface is that of ``Simulator``.

    Args:
        policy: any policy.
        shape: sizes and slots, in records.
        resident: bool [L, F] at first.
        prior: activation frequencies, or None.
        group_size: neurons in one record.
        debug: check every plan.
    """

    def __init__(
        self,
        policy: Policy,
        shape: Shape,
        resident: np.ndarray,
        prior: np.ndarray | None,
        group_size: int = 1,
        debug: bool = False,
    ) -> None:
        self.policy, self.shape, self.group_size, self.debug = policy, shape, group_size, debug
        self.cache = Cache(shape, resident)
        self.state = policy.init(shape, prior)

    def step(self, counts: np.ndarray) -> StepRecord:
        """Serve one token; ``counts`` holds the active neurons of each record, [L, F]."""
        record, size = StepRecord(active=int(counts.sum())), self.group_size
        shares = counts if counts.dtype == bool else (counts / size).astype(np.float32)
        for layer in range(self.shape.num_layers):
            self._layer(layer, counts[layer], shares[layer], record)
        record.gpu_ms = GPU_MS_FIXED + record.hits * GPU_MS_PER_HIT
        record.io_ms = record.promoted * size * LINK_MS_PER_PROMOTION
        record.cpu_ms = (record.active - record.hits) * CPU_MS_PER_RESIDUAL
        record.step_ms = max(record.gpu_ms, record.io_ms, record.cpu_ms)
        times = Times(record.gpu_ms, record.io_ms, record.cpu_ms)
        self.state = self.policy.feedback(self.state, None, times)
        report = getattr(self.policy, "report", None)
        record.report = report(self.state) if report else {}
        return record

    def _layer(self, layer: int, counts: np.ndarray, share: np.ndarray, record: StepRecord) -> None:
        cache, size = self.cache, self.group_size
        costs = Costs(
            max_moves=self.shape.num_neurons,
            free_slots=cache.free(layer),
            gpu_ms_per_record=GPU_MS_PER_HIT * size,
            cpu_ms_per_record=CPU_MS_PER_RESIDUAL * size,
            link_ms_per_record=LINK_MS_PER_PROMOTION * size,
            window_ms=GPU_MS_FIXED / self.shape.num_layers,
        )
        self.state, plan = self.policy.plan(self.state, layer, share, cache.resident[layer], costs)
        if self.debug:
            check_plan(plan, self.shape, layer, cache.resident[layer], costs)
        record.wasted += cache.apply(layer, plan, -np.inf)
        record.promoted += plan.load.size
        record.evicted += plan.evict.size
        record.hits += int(counts[cache.resident[layer]].sum())
        cache.unused[layer] &= counts == 0
