"""Our policy: per layer and step, move the number of records that minimises the layer's time.

Which records: by activation now and expected reuse (momentum at two time scales over the offline prior).
Costs come from the caller and are corrected by measured times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kairox_jax.balancing.contract import Active, Costs, Plan, Prior, Resident, Shape, Times
from kairox_jax.balancing.minimiser import best_count, best_whole_count, layer_time, most_useful_moves
from kairox_jax.balancing.momentum import Momentum, new_momentum
from kairox_jax.balancing.ranking import best_of

CLIP, RATE = 0.25, 0.05  # of the robust correction of costs, in units of log(measured / forecast)
IDLE_TURN = 8  # a layer looks for moves over an idle link once in so many steps


@dataclass
class SplitState:
    """Momentum, the last forecast (host, link) of each layer, and the log corrections of both costs."""

    momentum: Momentum
    forecast: list[tuple[float, float]]
    correction: list[float]
    waits: int = 0


@dataclass
class _Pairs:
    """Loads, best first, and who leaves for them, worst first; what the first k moves take off the host."""

    load: np.ndarray
    evict: np.ndarray
    moved: np.ndarray | None  # None: each move takes one record


class Split:
    """Minimise max(device, host) of each layer over the number of moves; evict the least expected reuse.

    Args:
        decay: of the momentum, a step, in (0, 1).
        recent_weight: how much more each of the last few steps counts in the momentum than older ones.
        reuse: weight of expected reuse against activation now, in (0, 1): an active absent neuron always
            outranks an idle resident, and reuse decides among equals.
        margin: a move over an idle link must raise the expected activation by so much (hysteresis).
        prior_steps: steps that the prior stands for.
        refit: correct the host's and the link's costs by the measured times.
    """

    def __init__(
        self,
        decay: float = 0.98,
        recent_weight: float = 2.0,
        reuse: float = 0.9,
        margin: float = 0.1,
        prior_steps: float = 16.0,
        refit: bool = True,
    ) -> None:
        for name, value in (("decay", decay), ("reuse", reuse)):
            if not 0 < value < 1:
                raise ValueError(f"{name} {value} must be in (0, 1)")
        if recent_weight < 0 or margin < 0 or prior_steps <= 0:
            raise ValueError(
                f"recent_weight {recent_weight} and margin {margin} must be 0 or more, "
                f"prior_steps {prior_steps} above 0"
            )
        self.decay, self.recent_weight, self.reuse = decay, recent_weight, reuse
        self.margin, self.prior_steps, self.refit = margin, prior_steps, refit

    def init(self, shape: Shape, prior: Prior | None) -> SplitState:
        """Return the prior as momentum."""
        return SplitState(
            new_momentum(shape, prior, self.decay, self.prior_steps),
            [(0.0, 0.0)] * shape.num_layers,
            [0.0, 0.0],
        )

    def plan(
        self, state: SplitState, layer: int, active: Active, resident: Resident, costs: Costs
    ) -> tuple[SplitState, Plan]:
        """Rank pairs of load and eviction, and take as many as minimise the layer's time."""
        state.momentum.add(layer, active)
        time = layer_time(costs, math.exp(state.correction[0]), math.exp(state.correction[1]))
        ids = active.nonzero()[0]
        held = resident.take(ids)
        if active.dtype == bool:
            on_device = float(np.count_nonzero(held))
            on_host = ids.size - on_device
        else:
            on_device = float(active[ids[held]].sum())
            on_host = float(active.sum()) - on_device
        limit = min(most_useful_moves(time, on_host), costs.max_moves)
        absent = ids.compress(~held)
        if active.dtype == bool:
            limit = min(limit, absent.size, costs.free_slots + resident.size)
            spare = np.count_nonzero(resident) - int(on_device) + costs.free_slots
            count = best_whole_count(time, on_host, on_device, min(limit, spare))
            pairs = self._whole_pairs(state, layer, absent, active, resident, count, costs.free_slots)
        else:
            pairs = self._share_pairs(state, layer, absent, active, resident, limit, costs.free_slots)
            count = best_count(time, on_host, on_device, pairs.moved)
        waits = count > time.in_time
        load, evict = pairs.load[:count], pairs.evict[: max(count - costs.free_slots, 0)]
        taken = float(count if pairs.moved is None else pairs.moved[count])
        if count < time.in_time and (state.momentum.steps[layer] + layer) % IDLE_TURN == 0:
            room = min(time.in_time, costs.max_moves) - count
            load, evict = self._use_idle_link(state, layer, active, resident, load, evict, room, costs)
        state.forecast[layer] = (time.host_ms(on_host - taken), time.link_ms(load.size))
        state.waits += waits
        return state, Plan(load, evict, wait=count if waits else 0)

    def _expected(self, state: SplitState, layer: int, ids: np.ndarray) -> np.ndarray:
        """Return the expected reuse of some neurons."""
        return state.momentum.at(layer, ids, self.recent_weight)

    def _whole_pairs(
        self,
        state: SplitState,
        layer: int,
        absent: np.ndarray,
        active: Active,
        resident: Resident,
        count: int,
        free: int,
    ) -> _Pairs:
        """Return ``count`` loads among the active absent, and idle residents that leave for them."""
        load, _ = best_of(absent, self._expected(state, layer, absent), count) if count else (absent[:0], None)
        if count <= free:
            return _Pairs(load, absent[:0], None)
        idle = np.greater(resident, active).nonzero()[0]
        evict, _ = best_of(idle, -self._expected(state, layer, idle), count - free)
        return _Pairs(load, evict, None)

    def _share_pairs(
        self,
        state: SplitState,
        layer: int,
        absent: np.ndarray,
        active: Active,
        resident: Resident,
        limit: int,
        free: int,
    ) -> _Pairs:
        """Return up to ``limit`` moves in which a load is worth more than who leaves for it.

        Worth is the share that is active now plus weighted reuse; a resident that is partly active may go.
        """

        def worth(ids: np.ndarray) -> np.ndarray:
            return active[ids] + np.float32(self.reuse) * self._expected(state, layer, ids)

        load, gains = best_of(absent, worth(absent), limit)
        held = resident.nonzero()[0]
        evict, losses = best_of(held, -worth(held), load.size - free)
        load = load[: free + evict.size]
        evict = evict[: max(load.size - free, 0)]
        better = np.count_nonzero(gains[free : load.size] + losses[: evict.size] > 0)
        load, evict = load[: min(load.size, free + better)], evict[:better]
        moved = np.zeros(load.size + 1)
        taken = active[load].astype(np.float64)
        taken[free : free + evict.size] -= active[evict]
        np.cumsum(taken, out=moved[1:])
        return _Pairs(load, evict, moved)

    def _use_idle_link(
        self,
        state: SplitState,
        layer: int,
        active: Active,
        resident: Resident,
        load: np.ndarray,
        evict: np.ndarray,
        room: int,
        costs: Costs,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Add moves that serve later steps only, where the link would idle and the margin is met."""
        outside, inside = ~resident, resident & (active == 0)
        outside[load] = inside[evict] = False
        free = costs.free_slots - load.size + evict.size
        absent, idle = outside.nonzero()[0], inside.nonzero()[0]
        more, gains = best_of(absent, self._expected(state, layer, absent), room)
        leave, losses = best_of(idle, -self._expected(state, layer, idle), more.size - free)
        paired = min(more.size - free, leave.size)
        if paired <= 0:
            return np.concatenate([load, more[:free]]), evict
        better = np.count_nonzero(gains[free : free + paired] + losses[:paired] > self.margin)
        return np.concatenate([load, more[: free + better]]), np.concatenate([evict, leave[:better]])

    def feedback(self, state: SplitState, layer: int | None, times: Times) -> SplitState:
        """Correct the costs by how far the layer's measured times are from the forecast."""
        if layer is None or not self.refit:
            return state
        for side, measured in enumerate((times.cpu_ms, times.io_ms)):
            forecast = state.forecast[layer][side]
            if forecast > 0 and measured > 0:
                error = math.log(measured / forecast)
                state.correction[side] += RATE * min(max(error, -CLIP), CLIP)
        return state

    def report(self, state: SplitState) -> dict[str, float]:
        """Return the corrections as factors, and the plans that waited since the last report."""
        waits, state.waits = state.waits, 0
        host, link = (math.exp(log) for log in state.correction)
        return {"cpu_factor": host, "link_factor": link, "waits": float(waits)}
