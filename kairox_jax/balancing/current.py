"""Q-Infer's policy: balance this round's work between device and host, until the deadline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kairox_jax.balancing.contract import Active, Costs, Plan, Prior, Resident, Shape, Times, as_share
from kairox_jax.balancing.ranking import exchange, loads_in_window, top_mask


class Current:
    """Swap in this round's most active while the host is slower, its least active while the device is.

    Swaps stop when the next layer is due or when the balance flips; nothing is remembered.
    """

    def init(self, shape: Shape, prior: Prior | None) -> np.ndarray:
        """Return the slots of each layer."""
        return shape.capacity

    def plan(
        self, state: np.ndarray, layer: int, active: Active, resident: Resident, costs: Costs
    ) -> tuple[np.ndarray, Plan]:
        """Pair loads and evictions by ascending index up to the deadline or the flip of the balance."""
        share = as_share(active)
        host_ms = float(share[~resident].sum()) * costs.cpu_ms_per_record
        device_ms = float(share[resident].sum()) * costs.gpu_ms_per_record
        more = host_ms > device_ms
        target = top_mask(share if more else -share, int(state[layer]), resident)
        loads, leaves = np.flatnonzero(target & ~resident), np.flatnonzero(resident & ~target)
        count = min(loads.size, costs.free_slots + leaves.size, loads_in_window(costs))
        loads = loads[:count]
        leaves = leaves[: max(count - costs.free_slots, 0)]
        gone = np.zeros(count, np.float32)
        gone[count - leaves.size :] = share[leaves]
        moved = np.cumsum(share[loads] - gone)
        host, device = host_ms - moved * costs.cpu_ms_per_record, device_ms + moved * costs.gpu_ms_per_record
        flipped = np.flatnonzero((host > device) != more)
        if flipped.size:
            count = int(flipped[0]) + 1
        return state, Plan(loads[:count], leaves[: max(count - costs.free_slots, 0)])

    def feedback(self, state: np.ndarray, layer: int | None, times: Times) -> np.ndarray:
        """Learn nothing from times."""
        return state


@dataclass
class CurrentFreqState:
    """Lifetime counts and the last ten steps of each layer."""

    lifetime: np.ndarray
    recent: np.ndarray
    clock: np.ndarray
    capacity: np.ndarray


class CurrentFreq:
    """The cache of Q-Infer's simulation switch: 0.1 * lifetime count + 0.9 * count in the last ten tokens.

    Active absent neurons come in for the residents of least score, at most half of the slots a step.
    """

    WINDOW = 10

    def init(self, shape: Shape, prior: Prior | None) -> CurrentFreqState:
        """Return no counts."""
        size = (shape.num_layers, shape.num_neurons)
        recent = np.zeros((shape.num_layers, self.WINDOW, shape.num_neurons), np.float32)
        return CurrentFreqState(
            np.zeros(size, np.float32), recent, np.zeros(shape.num_layers, np.int64), shape.capacity
        )

    def plan(
        self, state: CurrentFreqState, layer: int, active: Active, resident: Resident, costs: Costs
    ) -> tuple[CurrentFreqState, Plan]:
        """Load what is active by score; idle residents of least score leave first."""
        share = as_share(active)
        state.recent[layer, state.clock[layer] % self.WINDOW] = share
        state.clock[layer] += 1
        state.lifetime[layer] += share
        scores = 0.1 * state.lifetime[layer] + 0.9 * state.recent[layer].sum(0)
        wanted = (share > 0) | resident
        ranked = np.where(share > 0, scores + np.float32(1e9), scores)  # idle ones leave first
        target = top_mask(np.where(wanted, ranked, np.float32(-1)), int(state.capacity[layer]), resident)
        return state, exchange(target & wanted, resident, ranked, costs, int(state.capacity[layer]) // 2)

    def feedback(self, state: CurrentFreqState, layer: int | None, times: Times) -> CurrentFreqState:
        """Learn nothing from times."""
        return state
