"""How many records to move: the minimum of max(device, host) of one layer over the number of moves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from jaxtyping import Float64

from kairox_jax.balancing.contract import Costs
from kairox_jax.balancing.ranking import loads_in_window


def corrected(costs: Costs, correction: dict[str, float]) -> Costs:
    """Return the costs with host and link times multiplied by the exponentials of their corrections."""
    if not (correction["cpu"] or correction["link"]):
        return costs
    host, link = math.exp(correction["cpu"]), math.exp(correction["link"])
    return replace(
        costs,
        cpu_ms_per_record=costs.cpu_ms_per_record * host,
        cpu_ms_fixed=costs.cpu_ms_fixed * host,
        link_ms_per_record=costs.link_ms_per_record * link,
        link_ms_fixed=costs.link_ms_fixed * link,
    )


def most_useful_moves(costs: Costs, on_host: float) -> int:
    """Return a bound on the moves: beyond it, waiting takes longer than leaving everything to the host."""
    if costs.link_ms_per_record <= 0 or not costs.can_wait:
        return loads_in_window(costs)
    alone_ms = on_host * costs.cpu_ms_per_record + costs.cpu_ms_fixed
    return max(int((alone_ms + costs.window_ms - costs.link_ms_fixed) / costs.link_ms_per_record) + 1, 0)


def best_count(
    costs: Costs, on_host: float, on_device: float, moved: Float64[np.ndarray, " n"]
) -> tuple[int, bool]:
    """Return the number of moves with the least time of the layer, and whether the layer waits for them.

    Args:
        costs: of the layer.
        on_host, on_device: active records on each side without a move.
        moved: what the first k moves take off the host, for k = 0..n.
    """
    moves = np.arange(moved.size)
    left = on_host - moved
    host_ms = left * costs.cpu_ms_per_record + costs.cpu_ms_fixed * (left > 0)
    device_ms = (on_device + moved) * costs.gpu_ms_per_record
    in_time = min(loads_in_window(costs), moved.size - 1)
    if in_time + 1 < moved.size:
        late = slice(in_time + 1, None)
        exposed = moves[late] * costs.link_ms_per_record + costs.link_ms_fixed - costs.window_ms
        second = (moved[late] - moved[in_time]) * costs.gpu_ms_per_record + costs.gpu_ms_second
        device_ms[late] = np.maximum(device_ms[in_time], exposed) + second
    count = int(np.argmin(np.maximum(host_ms, device_ms)))
    return count, count > in_time
