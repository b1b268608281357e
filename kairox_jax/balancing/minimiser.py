"""How many records to move: the minimum of max(device, host) of one layer over the number of moves."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from kairox_jax.balancing.contract import Costs
from kairox_jax.balancing.ranking import loads_in_window


class LayerTime(NamedTuple):
    """Time of a layer as a function of what is moved; costs already corrected.

    Attributes:
        cpu, cpu_fixed, gpu, gpu_second, link, link_fixed, window: ms, as in ``Costs``.
        in_time: loads that arrive before the FFN starts.
        can_wait: later ones can be waited for.
    """

    cpu: float
    cpu_fixed: float
    gpu: float
    gpu_second: float
    link: float
    link_fixed: float
    window: float
    in_time: int
    can_wait: bool

    def host_ms(self, left: float) -> float:
        """Return the host's time for ``left`` records."""
        return left * self.cpu + self.cpu_fixed if left > 0 else 0.0

    def link_ms(self, moves: int) -> float:
        """Return the link's time for that many loads."""
        return moves * self.link + self.link_fixed if moves > 0 else 0.0


def layer_time(costs: Costs, host_factor: float, link_factor: float) -> LayerTime:
    """Return the time function of a layer, with its host and link costs multiplied by the factors."""
    link, fixed = costs.link_ms_per_record * link_factor, costs.link_ms_fixed * link_factor
    return LayerTime(
        costs.cpu_ms_per_record * host_factor,
        costs.cpu_ms_fixed * host_factor,
        costs.gpu_ms_per_record,
        costs.gpu_ms_second,
        link,
        fixed,
        costs.window_ms,
        loads_in_window(costs, link, fixed),
        costs.can_wait,
    )


def most_useful_moves(time: LayerTime, on_host: float) -> int:
    """Return a bound on the moves: beyond it, waiting takes longer than leaving everything to the host."""
    if time.link <= 0 or not time.can_wait:
        return time.in_time
    return max(int((time.host_ms(on_host) + time.window - time.link_fixed) / time.link) + 1, 0)


def best_count(time: LayerTime, host: float, device: float, moved: Float64[np.ndarray, " n"]) -> int:
    """Return the number of moves with the least time of the layer; of equals, the fewest.

    Args:
        time: of the layer.
        host, device: active records on each side without a move.
        moved: what the first k moves take off the host, for k = 0..n.
    """
    moves = np.arange(moved.size)
    left = host - moved
    host_ms = left * time.cpu + time.cpu_fixed * (left > 0)
    device_ms = (device + moved) * time.gpu
    in_time = min(time.in_time, moved.size - 1)
    if in_time + 1 < moved.size:
        late = slice(in_time + 1, None)
        exposed = moves[late] * time.link + time.link_fixed - time.window
        second = (moved[late] - moved[in_time]) * time.gpu + time.gpu_second
        device_ms[late] = np.maximum(device_ms[in_time], exposed) + second
    return int(np.argmin(np.maximum(host_ms, device_ms)))


def best_whole_count(time: LayerTime, host: float, device: float, limit: int) -> int:
    """Return ``best_count`` where each move takes one record off the host, without arrays.

    Host time falls and device time rises with the moves, both in straight pieces: the minimum lies at an
    end of a piece or beside a crossing.
    """
    cpu, fixed, gpu, second, link, link_fixed, window, in_time, can_wait = time
    host_alone = host * cpu + fixed
    ready = link_fixed - window  # what is waited for beside the records' own time
    # Beyond this, waiting takes longer than leaving everything to the host.
    useful = int((host_alone - ready) / link) + 1 if can_wait and link > 0 else in_time
    limit = max(min(limit, useful), 0)
    in_time = min(in_time, limit)
    rate = cpu + gpu
    if rate > 0:
        crossing = math.floor((host_alone - device * gpu) / rate)
        if crossing >= in_time and in_time < limit:  # the host is still slower: consider waiting
            device_bound = math.floor((host_alone - device * gpu - second) / rate)
            link_bound = math.floor((host_alone - ready - second + in_time * gpu) / (rate + link))
            late = min(max(min(device_bound, link_bound), in_time), limit - 1)
            candidates = (in_time, late, late + 1)
        else:
            early = min(max(crossing, 0), max(in_time - 1, 0))
            candidates = (early, min(early + 1, in_time))
    else:
        candidates = (limit,)
    best, least = 0, max(device * gpu, host_alone if host > 0 else 0.0)
    for k in candidates:
        device_ms = (device + min(k, in_time)) * gpu
        if k > in_time:
            device_ms = max(device_ms, k * link + ready) + (k - in_time) * gpu + second
        host_ms = (host - k) * cpu + fixed if k < host else 0.0
        ms = max(device_ms, host_ms)
        if ms < least or (ms == least and k < best):
            best, least = k, ms
    return best
