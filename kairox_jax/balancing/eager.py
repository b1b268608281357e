"""Ripple's rule (first version of Neuralink): load every active neuron before the layer runs.

The paper leaves the admission probability of segments, their length and the gap open; defaults are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kairox_jax.balancing.contract import Active, Costs, Plan, Prior, Resident, Shape, Times
from kairox_jax.balancing.ranking import worst_first


@dataclass
class EagerState:
    """Uses 0..3 [L, F], the step of entry [L, F], steps [L] and the random source of admission."""

    uses: np.ndarray
    entered: np.ndarray
    clock: np.ndarray
    rng: np.random.Generator


def run_lengths(mask: np.ndarray) -> np.ndarray:
    """Return for each position the length of the run of set positions around it (0 outside)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    lengths = np.zeros(mask.size, np.int64)
    starts, ends = edges[::2], edges[1::2]
    lengths[mask] = np.repeat(ends - starts, ends - starts)
    return lengths


class Eager:
    """Everything active is loaded and waited for; the cache behind it is FIFO with use counts (S3-FIFO).

    Args:
        segment: a run of at least so many loads is a segment.
        admit_segment: probability that a segment's neurons stay; others are the next to leave.
        gap: inactive neurons between two runs are read too when they are at most so many.
        seed: of the admission.
    """

    def __init__(self, segment: int = 4, admit_segment: float = 0.5, gap: int = 0, seed: int = 0) -> None:
        if segment < 2 or not 0 <= admit_segment <= 1 or gap < 0:
            raise ValueError(
                f"segment {segment} >= 2, admit_segment {admit_segment} in [0, 1], gap {gap} >= 0"
            )
        self.segment, self.admit_segment, self.gap, self.seed = segment, admit_segment, gap, seed

    def init(self, shape: Shape, prior: Prior | None) -> EagerState:
        """Return an unused cache."""
        size = (shape.num_layers, shape.num_neurons)
        return EagerState(
            np.zeros(size, np.int8),
            np.zeros(size, np.int64),
            np.zeros(shape.num_layers, np.int64),
            np.random.default_rng(self.seed),
        )

    def plan(
        self, state: EagerState, layer: int, active: Active, resident: Resident, costs: Costs
    ) -> tuple[EagerState, Plan]:
        """Load all that is active and absent, as far as slots reach, and wait for it."""
        state.clock[layer] += 1
        uses, entered, clock = state.uses[layer], state.entered[layer], int(state.clock[layer])
        needed = active > 0
        uses[needed & resident] = np.minimum(uses[needed & resident] + 1, 3)
        loads = np.flatnonzero(self._reads(needed, resident))
        loads = loads[np.argsort(~needed[loads], kind="stable")]  # what is needed before what fills gaps
        age = uses * np.float64(2**40) + entered
        leaves = worst_first(np.flatnonzero(resident & ~needed), age)
        count = min(loads.size, costs.max_moves, costs.free_slots + leaves.size)
        loads, leaves = loads[:count], leaves[: max(count - costs.free_slots, 0)]
        if leaves.size:  # the queue's hand passed the older ones: each lost a use
            passed = resident & ~needed & (entered <= entered[leaves].max())
            uses[passed] = np.maximum(uses[passed] - 1, 0)
        in_segment = run_lengths(needed & ~resident)[loads] >= self.segment
        rejected = in_segment & (state.rng.random(loads.size) >= self.admit_segment)
        uses[loads], entered[loads] = 0, np.where(rejected, -1, clock)
        return state, Plan(loads, leaves, wait=int(needed[loads].sum()))

    def _reads(self, needed: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """Return what a merged read brings in: the needed and absent, and short gaps between them."""
        absent = needed & ~resident
        if self.gap == 0 or np.count_nonzero(absent) < 2:
            return absent
        gaps = ~absent
        short = gaps & (run_lengths(gaps) <= self.gap)
        first, last = np.flatnonzero(absent)[[0, -1]]
        short[:first] = short[last:] = False
        return absent | (short & ~resident)

    def feedback(self, state: EagerState, layer: int | None, times: Times) -> EagerState:
        """Learn nothing from times."""
        return state
