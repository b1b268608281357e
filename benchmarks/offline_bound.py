"""What no placement policy can exceed on one layer of a trace: the dual of the best placement with hindsight.

Prices for slots and loads, a two-state dynamic program for every neuron at once, subgradient steps on the prices.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool


def offline_bound(
    active: Bool[np.ndarray, "T F"],
    resident: Bool[np.ndarray, " F"],
    *,
    slots: int,
    load_price: float,
    max_loads: int,
    iterations: int = 100,
) -> float:
    """Return an upper bound on hits less ``load_price`` for each load, summed over the steps.

    Maximise sum(active * x) - load_price * sum(y), where x is resident, y = max(x - x of the step before, 0), at most
    ``slots`` of x and ``max_loads`` of y in a step. Any prices give a bound; the least found is returned.

    Args:
        active: of each step.
        resident: before the first step.
        slots: of the layer.
        load_price: hits that a load costs.
        max_loads: of a step.
        iterations: of the search for prices.
    """
    steps, neurons = active.shape
    slot_price, move_price, best = np.full(steps, active.mean()), np.zeros(steps), np.inf
    keep, load = np.empty((steps, neurons), bool), np.empty((steps, neurons), bool)
    for iteration in range(iterations):
        inside, outside = np.zeros(neurons), np.zeros(neurons)  # value of the steps to come
        for step in range(steps - 1, -1, -1):
            stays = active[step] - slot_price[step] + inside
            enters = stays - load_price - move_price[step]
            keep[step], load[step] = stays > outside, enters > outside
            inside, outside = np.maximum(stays, outside), np.maximum(enters, outside)
        value = np.where(resident, inside, outside).sum()
        best = min(best, value + slots * slot_price.sum() + max_loads * move_price.sum())
        now, used, loaded = resident, np.empty(steps), np.empty(steps)
        for step in range(steps):
            before, now = now, np.where(now, keep[step], load[step])
            used[step], loaded[step] = now.sum(), (now & ~before).sum()
        rate = 0.3 / np.sqrt(iteration + 1)
        slot_price = np.maximum(slot_price + rate * (used - slots) / slots, 0)
        move_price = np.maximum(move_price + 0.5 * rate * (loaded - max_loads) / max_loads, 0)
    return float(best)
