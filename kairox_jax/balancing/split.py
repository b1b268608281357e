"""Our policy: per layer and step, move the number of records that minimises the layer's time.

Which records: by activation now and expected reuse (momentum at two time scales over the offline prior).
Costs come from the caller and are corrected by measured times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from kairox_jax.balancing.contract import Active, Costs, Plan, Prior, Resident, Shape, Times
from kairox_jax.balancing.minimiser import best_count, corrected, most_useful_moves
from kairox_jax.balancing.momentum import Momentum, new_momentum
from kairox_jax.balancing.ranking import best_of, loads_in_window

CLIP, RATE = 0.25, 0.05  # of the robust correction of costs, in units of log(measured / forecast)


@dataclass
class SplitState:
    """Momentum at two scales, forecasts per layer, and the learnt log corrections of host and link."""

    slow: Momentum
    fast: Momentum
    forecast: np.ndarray
    buffer: np.ndarray
    value: np.ndarray
    correction: dict[str, float] = field(default_factory=lambda: {"cpu": 0.0, "link": 0.0})
    chosen: np.ndarray = field(default_factory=lambda: np.zeros(2))


class Split:
    """Minimise max(device, host) of each layer over the number of moves; evict the least expected reuse.

    Args:
        decay: of the slow momentum, a step, in (0, 1).
        fast_decay: of the fast momentum.
        fast_share: weight of the fast momentum in expected reuse, in [0, 1].
        reuse: weight of expected reuse against activation now, in (0, 1): an active absent neuron always
            outranks an idle resident, and reuse decides among equals.
        margin: a move over an idle link must raise the expected activation by so much (hysteresis).
        prior_steps: steps that the prior stands for.
        refit: correct the host's and the link's costs by the measured times.
    """

    def __init__(
        self,
        decay: float = 0.98,
        fast_decay: float = 0.8,
        fast_share: float = 0.2,
        reuse: float = 0.9,
        margin: float = 0.1,
        prior_steps: float = 16.0,
        refit: bool = True,
    ) -> None:
        for name, value in (("decay", decay), ("fast_decay", fast_decay), ("reuse", reuse)):
            if not 0 < value < 1:
                raise ValueError(f"{name} {value} must be in (0, 1)")
        if not 0 <= fast_share <= 1 or margin < 0 or prior_steps <= 0:
            raise ValueError(
                f"fast_share {fast_share} in [0, 1], margin {margin} >= 0, prior_steps {prior_steps} > 0"
            )
        self.decay, self.fast_decay, self.fast_share = decay, fast_decay, fast_share
        self.reuse, self.margin, self.prior_steps, self.refit = reuse, margin, prior_steps, refit

    def init(self, shape: Shape, prior: Prior | None) -> SplitState:
        """Return the prior as momentum."""
        return SplitState(
            new_momentum(shape, prior, self.decay, self.prior_steps),
            new_momentum(shape, prior, self.fast_decay, 1.0 / (1.0 - self.fast_decay)),
            np.zeros((shape.num_layers, 2)),
            np.empty(shape.num_neurons, np.float32),
            np.empty(shape.num_neurons, np.float32),
        )

    def plan(
        self, state: SplitState, layer: int, active: Active, resident: Resident, costs: Costs
    ) -> tuple[SplitState, Plan]:
        """Rank pairs of load and eviction, and take as many as minimise the layer's time."""
        state.slow.add(layer, active, state.buffer)
        state.fast.add(layer, active, state.buffer)
        value = self._value(state, layer, active)
        costs = corrected(costs, state.correction)
        absent = ~resident
        on_host, on_device = _load_of(active, absent), _load_of(active, resident)
        limit = min(most_useful_moves(costs, on_host), costs.max_moves)
        loads, leaves = _pairs(value, active, absent, resident, limit, costs.free_slots)
        moved = np.zeros(loads.size + 1)
        np.cumsum(_gains(active, loads, leaves, costs.free_slots), out=moved[1:])
        count, waits = best_count(costs, on_host, on_device, moved)
        plan = Plan(loads[:count], leaves[: max(count - costs.free_slots, 0)], wait=count if waits else 0)
        in_window = loads_in_window(costs)
        if count < in_window:
            plan = self._use_idle_link(plan, value, active, resident, costs, in_window)
        left = on_host - moved[count]
        sent = plan.load.size
        state.forecast[layer, 0] = left * costs.cpu_ms_per_record + costs.cpu_ms_fixed if left > 0 else 0.0
        state.forecast[layer, 1] = sent * costs.link_ms_per_record + costs.link_ms_fixed if sent else 0.0
        state.chosen += (sent, 1 if waits else 0)
        return state, plan

    def _value(self, state: SplitState, layer: int, active: Active) -> np.ndarray:
        """Return activation now plus weighted expected reuse, in the state's buffer."""
        value, buffer = state.value, state.buffer
        slow = self.reuse * (1 - self.fast_share) * state.slow.factor(layer)
        fast = self.reuse * self.fast_share * state.fast.factor(layer)
        np.multiply(state.slow.table[layer], np.float32(slow), out=value)
        np.multiply(state.fast.table[layer], np.float32(fast), out=buffer)
        value += buffer
        value += active
        return value

    def _use_idle_link(
        self,
        plan: Plan,
        value: np.ndarray,
        active: Active,
        resident: Resident,
        costs: Costs,
        in_window: int,
    ) -> Plan:
        """Add moves that serve later steps only, where the link would idle and the margin is met."""
        after = resident.copy()
        after[plan.load], after[plan.evict] = True, False
        barred = plan.evict
        free = costs.free_slots - plan.load.size + plan.evict.size
        room = min(in_window, costs.max_moves) - plan.load.size
        idle = value - active
        outside = ~after
        outside[barred] = False
        inside = after & (active == 0)
        inside[plan.load] = False
        loads = best_of(np.flatnonzero(outside), idle, room)
        leaves = best_of(np.flatnonzero(inside), -idle, room)
        count = min(loads.size, free + leaves.size)
        paired = loads[free:count]
        gain = idle[paired] - idle[leaves[: paired.size]]
        count = min(count, free) + int(np.count_nonzero(gain > self.margin * self.reuse))
        return Plan(
            np.concatenate([plan.load, loads[:count]]),
            np.concatenate([plan.evict, leaves[: max(count - free, 0)]]),
            wait=plan.wait,
        )

    def feedback(self, state: SplitState, layer: int | None, times: Times) -> SplitState:
        """Correct the costs by how far the layer's measured times are from the forecast."""
        if layer is None or not self.refit:
            return state
        for key, forecast, measured in (
            ("cpu", state.forecast[layer, 0], times.cpu_ms),
            ("link", state.forecast[layer, 1], times.io_ms),
        ):
            if forecast > 0 and measured > 0:
                error = math.log(measured / forecast)
                state.correction[key] += RATE * min(max(error, -CLIP), CLIP)
        return state

    def report(self, state: SplitState) -> dict[str, float]:
        """Return the corrections as factors, and plans that waited since the last report."""
        waited, state.chosen[:] = float(state.chosen[1]), 0
        factors = {f"{key}_factor": math.exp(log) for key, log in state.correction.items()}
        return {**factors, "waits": waited}


def _load_of(active: Active, mask: np.ndarray) -> float:
    """Return the activation within ``mask``: a count, or a sum of shares."""
    return float(np.count_nonzero(active & mask) if active.dtype == bool else active[mask].sum())


def _pairs(
    value: np.ndarray, active: Active, absent: np.ndarray, resident: Resident, limit: int, free: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return loads, best first, and who leaves for them, worst first, where that gains value."""
    is_active = active if active.dtype == bool else active > 0
    loads = best_of(np.flatnonzero(is_active & absent), value, limit)
    # A fully active resident is never worth less than a load: leave it out where there are no shares.
    may_leave = resident & ~is_active if active.dtype == bool else resident
    leaves = best_of(np.flatnonzero(may_leave), -value, loads.size - free)
    loads = loads[: free + leaves.size]
    leaves = leaves[: max(loads.size - free, 0)]
    better = np.count_nonzero(value[loads[free:]] > value[leaves])
    return loads[: min(loads.size, free + better)], leaves[:better]


def _gains(active: Active, loads: np.ndarray, leaves: np.ndarray, free: int) -> np.ndarray:
    """Return what each move takes off the host."""
    gains = active[loads].astype(np.float64)
    gains[free : free + leaves.size] -= active[leaves]
    return gains
