"""Our policy: per layer and step, move the number of records that minimises the layer's time.

Which records: by activation now and expected reuse (slow momentum over the offline prior:
short momentum is noise, docs/policies.md).
Costs come from the caller and are corrected by measured times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kairox_jax.balancing.contract import Active, Costs, Plan, Prior, Resident, Shape, Times
from kairox_jax.balancing.minimiser import (
    LayerTime,
    best_count,
    best_whole_count,
    layer_time,
    most_useful_moves,
)
from kairox_jax.balancing.momentum import Momentum, new_momentum
from kairox_jax.balancing.ranking import best_of, some_best, some_worst

CLIP, RATE = 0.25, 0.05  # of the robust correction of costs, in units of log(measured / forecast)
IDLE_TURN = 16  # a layer looks for moves over an idle link once in so many steps
LIKELY_PRICE = 1.0  # the least of `price` where nothing is foreseen: far fewer loads for hardly more time
REFIT_TURN = 4  # and corrects the costs once in so many


@dataclass
class SplitState:
    """Momentum, last forecast (host, link) of each layer, corrections of both costs (log, factor), steps seen."""

    momentum: Momentum
    forecast: list[tuple[float, float]]
    correction: list[float]
    factor: list[float]
    turns: list[int]
    waits: int = 0


class Split:
    """Minimise max(device, host) of each layer over the number of moves; evict the least expected reuse.

    Args:
        decay: of the momentum, a step, in (0, 1).
        reuse: weight of expected reuse against activation now, in (0, 1): an active absent neuron always
            outranks an idle resident, and reuse decides among equals.
        again: expected activation that activity in the last step adds, where the next one is not foreseen.
        price: hits that a load must earn back; 0 minimises time alone, for which an idle link costs nothing.
        margin: a move over an idle link must raise the expected activation by so much (hysteresis).
        prior_steps: steps that the prior stands for.
        refit: correct the host's and the link's costs by the measured times.
    """

    def __init__(
        self,
        decay: float = 0.98,
        reuse: float = 0.9,
        again: float = 0.1,
        price: float = 0.0,
        margin: float = 0.1,
        prior_steps: float = 16.0,
        refit: bool = True,
    ) -> None:
        for name, value in (("decay", decay), ("reuse", reuse)):
            if not 0 < value < 1:
                raise ValueError(f"{name} {value} must be in (0, 1)")
        for name, value in (("again", again), ("price", price), ("margin", margin)):
            if value < 0:
                raise ValueError(f"{name} {value} must be 0 or more")
        if prior_steps <= 0:
            raise ValueError(f"prior_steps {prior_steps} must be above 0")
        self.decay, self.reuse, self.margin = decay, reuse, margin
        self.again, self.price = again, price
        self.prior_steps, self.refit = prior_steps, refit

    def init(self, shape: Shape, prior: Prior | None) -> SplitState:
        """Return the prior as momentum."""
        return SplitState(
            new_momentum(shape, prior, self.decay, self.prior_steps),
            [(0.0, 0.0)] * shape.num_layers,
            [0.0, 0.0],
            [1.0, 1.0],
            [0] * shape.num_layers,
        )

    def plan(
        self, state: SplitState, layer: int, active: Active, resident: Resident, costs: Costs
    ) -> tuple[SplitState, Plan]:
        """Rank pairs of load and eviction, and take as many as minimise the layer's time."""
        time = layer_time(costs, *state.factor)
        choose = self._choose_shares
        if active.dtype == bool:
            in_time = costs.foreseen and not self.price
            choose = self._choose_whole if in_time else self._choose_likely
        load, evict, left = choose(state, layer, active, resident, costs, time)
        waits = load.size > time.in_time
        wait = load.size if waits else 0
        state.turns[layer] += 1
        if load.size < time.in_time and not self.price and (state.turns[layer] + layer) % IDLE_TURN == 0:
            load, evict = self._use_idle_link(state, layer, active, resident, load, evict, costs, time)
        if load.size and not self._pays(state, layer, active, load, evict, costs, time):
            load, evict, wait, waits = load[:0], evict[:0], 0, False
            left = float(active[~resident].sum())
        state.forecast[layer] = (time.host_ms(left), time.link_ms(load.size))
        state.waits += waits
        return state, Plan(load, evict, wait=wait)

    def _expected(self, state: SplitState, layer: int) -> tuple[np.ndarray, float]:
        """Return expected reuse of the layer's neurons as a row and the factor that brings it to 0..1."""
        return state.momentum.table[layer], state.momentum.factor(layer)

    def _choose_whole(
        self,
        state: SplitState,
        layer: int,
        active: Active,
        resident: Resident,
        costs: Costs,
        time: LayerTime,
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Return loads among the active absent, idle residents that leave, and what is left to the host.

        Each move takes one record off the host, so the number comes first and only so many are ranked.
        """
        state.momentum.add(layer, active)
        # One search of all flags for both sides: searches of few ids are cheap, those of all are not.
        movable = (active != resident).nonzero()[0]
        is_idle = resident.take(movable)
        absent = movable.compress(~is_idle)
        hits = int(np.count_nonzero(active)) - absent.size
        limit = min(costs.max_moves, absent.size, costs.free_slots + movable.size - absent.size)
        count = best_whole_count(time, absent.size, hits, limit)
        if count == 0:
            return absent[:0], absent[:0], absent.size
        row, _ = self._expected(state, layer)
        if count > time.in_time:  # an order is of use to who comes late
            load, _ = best_of(absent, row.take(absent), count)
        else:
            load = some_best(absent, row.take(absent), count)
        if count <= costs.free_slots:
            return load, absent[:0], absent.size - count
        idle = movable.compress(is_idle)
        return load, some_worst(idle, row.take(idle), count - costs.free_slots), absent.size - count

    def _choose_likely(
        self,
        state: SplitState,
        layer: int,
        active: Active,
        resident: Resident,
        costs: Costs,
        time: LayerTime,
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Return the same where ``active`` is of the last step, or loads have a price: what counts is who is likely.

        A load must be likelier than who leaves for it, activity counting as ``again``, and earn its price back in
        1 / ``again`` steps.
        """
        state.momentum.add(layer, active)
        row, factor = self._expected(state, layer)
        likely = row * np.float32(factor) + np.float32(self.again) * active
        absent, held = np.greater(active, resident).nonzero()[0], resident.nonzero()[0]
        limit = min(time.in_time, costs.max_moves)
        load, gains = best_of(absent, likely.take(absent), limit)
        free = costs.free_slots
        evict, losses = best_of(held, -likely.take(held), load.size - free)
        paired = min(max(load.size - free, 0), evict.size)
        least = self.again * (self.price if costs.foreseen else max(self.price, LIKELY_PRICE))
        better = int(np.count_nonzero(gains[free : free + paired] + losses[:paired] > least))
        load, evict = load[: free + better], evict[:better]
        return load, evict, float(np.count_nonzero(np.greater(active, resident)) - load.size)

    def _choose_shares(
        self,
        state: SplitState,
        layer: int,
        active: Active,
        resident: Resident,
        costs: Costs,
        time: LayerTime,
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Return loads, who leaves for them, and what is left to the host, where activation is a share.

        A load must be worth more than who leaves, partly active residents included; worth is the share that
        is active now plus weighted reuse.
        """
        state.momentum.add(layer, active)
        row, factor = self._expected(state, layer)
        worth = row * np.float32(self.reuse * factor) + active
        on_device = float(active[resident].sum())
        on_host = float(active.sum()) - on_device
        limit = min(most_useful_moves(time, on_host), costs.max_moves)
        absent, held = np.greater(active > 0, resident).nonzero()[0], resident.nonzero()[0]
        load, gains = best_of(absent, worth[absent], limit)
        free = costs.free_slots
        evict, losses = best_of(held, -worth[held], load.size - free)
        paired = min(max(load.size - free, 0), evict.size)
        better = int(np.count_nonzero(gains[free : free + paired] + losses[:paired] > 0))
        load, evict = load[: free + better], evict[:better]
        moved = np.zeros(load.size + 1)
        taken = active[load].astype(np.float64)
        taken[free : free + better] -= active[evict]
        np.cumsum(taken, out=moved[1:])
        count = best_count(time, on_host, on_device, moved)
        return load[:count], evict[: max(count - free, 0)], on_host - float(moved[count])

    def _use_idle_link(
        self,
        state: SplitState,
        layer: int,
        active: Active,
        resident: Resident,
        load: np.ndarray,
        evict: np.ndarray,
        costs: Costs,
        time: LayerTime,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Add moves that serve later steps only, where the link would idle and the margin is met."""
        row, factor = self._expected(state, layer)
        inside = resident & np.logical_not(active)
        inside[evict] = False
        free = costs.free_slots - load.size + evict.size
        idle = inside.nonzero()[0]
        if free == 0 and idle.size == 0:
            return load, evict
        # Without an empty slot, only who beats the worst by the margin is a candidate.
        least = -np.inf if free else row.take(idle).min() + self.margin / factor
        better_ones = np.greater(row > least, resident)
        better_ones[load] = False
        absent = better_ones.nonzero()[0]
        if absent.size == 0:
            return load, evict
        more, gains = best_of(absent, row.take(absent), min(time.in_time, costs.max_moves) - load.size)
        leave, losses = best_of(idle, -row.take(idle), more.size - free)
        paired = min(max(more.size - free, 0), leave.size)
        better = int(np.count_nonzero((gains[free : free + paired] + losses[:paired]) * factor > self.margin))
        return np.concatenate([load, more[: free + better]]), np.concatenate([evict, leave[:better]])

    def _pays(
        self,
        state: SplitState,
        layer: int,
        active: Active,
        load: np.ndarray,
        evict: np.ndarray,
        costs: Costs,
        time: LayerTime,
    ) -> bool:
        """Say whether a plan saves the host what it costs the step, in this step or within 1 / ``again`` steps."""
        price = costs.step_ms_fixed + costs.step_ms_per_record * load.size
        if price <= 0:
            return True
        row, factor = self._expected(state, layer)
        gain = float(row.take(load).sum() - row.take(evict[: load.size]).sum()) * factor
        if self.again:
            gain /= self.again
        if costs.foreseen:  # who leaves can come back when it is foreseen: that is a load of its own
            gain = max(gain, 0.0) + float(active.take(load).sum())
        return gain * time.cpu > price

    def feedback(self, state: SplitState, layer: int | None, times: Times) -> SplitState:
        """Correct the costs by how far the layer's measured times are from the forecast."""
        if layer is None or not self.refit or (state.turns[layer] + layer) % REFIT_TURN:
            return state
        for side, measured in enumerate((times.cpu_ms, times.io_ms)):
            forecast = state.forecast[layer][side]
            if forecast > 0 and measured > 0:
                error = math.log(measured / forecast)
                state.correction[side] += RATE * min(max(error, -CLIP), CLIP)
                state.factor[side] = math.exp(state.correction[side])
        return state

    def report(self, state: SplitState) -> dict[str, float]:
        """Return the corrections as factors, and the plans that waited since the last report."""
        waits, state.waits = state.waits, 0
        host, link = state.factor
        return {"cpu_factor": host, "link_factor": link, "waits": float(waits)}
