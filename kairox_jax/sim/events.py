"""The event simulator: device, host and link of one token after another, layer by layer.

A layer's plan is made one layer ahead, or, as the engine does without predictors, before the step from what was
active in the last one. Its transfers hide in the window until its FFN starts; what is late is computed on the host,
or waited for where the plan says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kairox_jax.balancing import Costs, Plan, Policy, Shape, Times, check_plan
from kairox_jax.sim.machine import LayerCosts


@dataclass
class StepRecord:
    """Counts and times (ms) of one token; times are scaled to the model's number of layers."""

    active: int = 0
    hits: int = 0
    promoted: int = 0
    evicted: int = 0
    wasted: int = 0
    late: int = 0
    gpu_ms: float = 0.0
    io_ms: float = 0.0
    cpu_ms: float = 0.0
    step_ms: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)


class Cache:
    """Slots of all layers: who is resident, since when, and whether a promotion was ever used."""

    def __init__(self, shape: Shape, resident: np.ndarray) -> None:
        self.shape = shape
        self.resident = resident.copy()
        self.arrival = np.full(resident.shape, -np.inf)
        self.unused = np.zeros(resident.shape, bool)
        self.held = resident.sum(1)

    def free(self, layer: int) -> int:
        """Slots that hold nothing."""
        return int(self.shape.capacity[layer] - self.held[layer])

    def apply(self, layer: int, plan: Plan, arrival: np.ndarray | float) -> int:
        """Carry out a plan and return how many evicted promotions were never used."""
        wasted = int(self.unused[layer, plan.evict].sum())
        self.resident[layer, plan.evict] = False
        self.unused[layer, plan.evict] = False
        self.resident[layer, plan.load] = self.unused[layer, plan.load] = True
        self.arrival[layer, plan.load] = arrival
        self.held[layer] += plan.load.size - plan.evict.size
        return wasted


class Simulator:
    """Runs one policy over the steps of a trace on a machine.

    Args:
        policy: any policy of ``kairox_jax.balancing``.
        shape: sizes and slots, in records.
        resident: bool [L, F] at first.
        prior: activation frequencies [L, F], or None.
        costs: of one layer.
        group_size: neurons of the trace in one record.
        queue_ms: transfers that may wait for the link; what would come later is not loaded.
        can_wait: the executor waits for loads where a plan says so; else all late ones go to the host.
        debug: check every plan.
        forecast: "perfect": a layer is planned one layer ahead, from what it will compute. The engine's two ways,
            in which nothing is waited for: "adjacent", with predictors: so too, but the first layer, which is planned
            before the step from what it computed in the last one; "previous", without: all layers are.
        max_moves: the most records that a plan loads; None leaves it to the queue.
    """

    def __init__(
        self,
        policy: Policy,
        shape: Shape,
        resident: np.ndarray,
        prior: np.ndarray | None,
        costs: LayerCosts,
        group_size: int = 1,
        queue_ms: float = 4.0,
        can_wait: bool = True,
        debug: bool = False,
        forecast: str = "perfect",
        max_moves: int | None = None,
    ) -> None:
        self.policy, self.shape, self.costs, self.group_size = policy, shape, costs, group_size
        self.queue_ms, self.debug = queue_ms, debug
        self.forecast, self.can_wait = forecast, can_wait and forecast == "perfect"
        self.max_moves = shape.num_neurons if max_moves is None else max_moves
        self.cache = Cache(shape, resident)
        self.state = policy.init(shape, prior)
        self.now = self.link_free = 0.0
        self.waits = np.full(shape.num_layers, -np.inf)
        self.io_ms = np.zeros(shape.num_layers)
        self.seen: np.ndarray | None = None  # shares that were active in the last step
        self.layers_ms = 0.0  # device and host time of its layers

    def step(self, counts: np.ndarray) -> StepRecord:
        """Serve one token.

        Args:
            counts: active neurons of each record, [L, F] (bool where a record is one neuron).
        """
        record, costs, begin = StepRecord(active=int(counts.sum())), self.costs, self.now
        shares = counts if counts.dtype == bool else (counts / self.group_size).astype(np.float32)
        start = self.now + costs.head_ms + costs.attention_ms
        if self.forecast == "perfect":
            self._plan(0, shares[0], self.now, start, record)
        elif self.seen is not None:
            for layer in range(1 if self.forecast == "adjacent" else self.shape.num_layers):
                due = self.now + self.layers_ms * (layer + 1) / self.shape.num_layers
                self._plan(layer, self.seen[layer], self.now, due, record, foreseen=False)
        self.seen, times = shares, []
        for layer in range(self.shape.num_layers):
            end, layer_times = self._ffn(layer, counts[layer], start, record)
            times.append(layer_times)
            following = end + costs.attention_ms
            if self.forecast != "previous" and layer + 1 < self.shape.num_layers:
                self._plan(layer + 1, shares[layer + 1], start, following, record)
            start = following
            self.now = end
        self.layers_ms = record.gpu_ms + record.cpu_ms
        wall = self.now - begin - costs.head_ms
        record.step_ms = costs.head_ms + wall * costs.layer_scale
        for name in ("gpu_ms", "io_ms", "cpu_ms"):
            setattr(record, name, getattr(record, name) * costs.layer_scale)
        record.gpu_ms += costs.head_ms
        for layer, layer_times in enumerate(times):
            self.state = self.policy.feedback(self.state, layer, layer_times)
        self.state = self.policy.feedback(self.state, None, Times(record.gpu_ms, record.io_ms, record.cpu_ms))
        report = getattr(self.policy, "report", None)
        record.report = report(self.state) if report else {}
        return record

    def _plan(
        self,
        layer: int,
        share: np.ndarray,
        now: float,
        start: float,
        record: StepRecord,
        foreseen: bool = True,
    ) -> None:
        """Let the policy plan ``layer`` at time ``now``, whose FFN is due at ``start``; send the loads."""
        costs, cache = self.costs, self.cache
        link_start = max(now, self.link_free)
        layer_costs = self._layer_costs(layer, start, link_start, foreseen)
        self.state, plan = self.policy.plan(self.state, layer, share, cache.resident[layer], layer_costs)
        if self.debug:
            check_plan(plan, self.shape, layer, cache.resident[layer], layer_costs)
        num_loads = plan.load.size
        done = link_start + costs.link_ms_fixed + np.arange(1, num_loads + 1) * costs.link_ms_per_record
        record.wasted += cache.apply(layer, plan, done)
        record.promoted += num_loads
        record.evicted += plan.evict.size
        self.waits[layer] = done[plan.wait - 1] if plan.wait and self.can_wait else -np.inf
        self.io_ms[layer] = 0.0
        if num_loads:
            self.link_free = float(done[-1])
            self.io_ms[layer] = self.link_free - link_start
            record.io_ms += self.io_ms[layer]

    def _layer_costs(self, layer: int, start: float, link_start: float, foreseen: bool) -> Costs:
        """Return what a plan costs whose transfers begin at ``link_start`` for an FFN due at ``start``."""
        costs = self.costs
        room_ms = start + self.queue_ms - link_start - costs.link_ms_fixed
        return Costs(
            max_moves=min(max(int(room_ms / costs.link_ms_per_record), 0), self.max_moves),
            free_slots=self.cache.free(layer),
            gpu_ms_per_record=costs.gpu_ms_per_neuron * self.group_size,
            cpu_ms_per_record=costs.cpu_ms_per_neuron * self.group_size,
            link_ms_per_record=costs.link_ms_per_record,
            link_ms_fixed=costs.link_ms_fixed,
            window_ms=start - link_start,
            cpu_ms_fixed=costs.cpu_ms_fixed,
            can_wait=self.can_wait,
            gpu_ms_second=costs.gpu_ms_second,
            record_bytes=int(costs.record_bytes),
            foreseen=foreseen,
        )

    def _ffn(self, layer: int, counts: np.ndarray, start: float, record: StepRecord) -> tuple[float, Times]:
        """Compute a layer's FFN from ``start`` on and return when it ends, and the layer's times."""
        costs, cache = self.costs, self.cache
        resident = cache.resident[layer]
        ready = resident & (cache.arrival[layer] <= max(start, self.waits[layer]))
        hits, total = int(counts[ready].sum()), int(counts.sum())
        cache.unused[layer] &= ~(ready & (counts > 0))
        gpu_ms = hits * costs.gpu_ms_per_neuron
        device_end = start + gpu_ms
        if self.waits[layer] > start:  # what is there is computed while the rest arrives
            early = int(counts[resident & (cache.arrival[layer] <= start)].sum())
            first, second = early * costs.gpu_ms_per_neuron, (hits - early) * costs.gpu_ms_per_neuron
            device_end = max(start + first, self.waits[layer]) + second + costs.gpu_ms_second
            gpu_ms += costs.gpu_ms_second
        cpu_ms = (total - hits) * costs.cpu_ms_per_neuron + (costs.cpu_ms_fixed if total > hits else 0.0)
        record.hits += hits
        record.late += int(counts[resident & ~ready].sum())
        record.gpu_ms += costs.attention_ms + gpu_ms
        record.cpu_ms += cpu_ms
        times = Times(costs.attention_ms + gpu_ms, float(self.io_ms[layer]), cpu_ms)
        return max(device_end, start + cpu_ms), times
