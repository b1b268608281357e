"""Improve balanced groups by swapping neurons between them, on exact co-activation counts of the sample.

A swap's gain needs each neuron's co-activation with whole groups, [F, F / size] numbers, and with single
neurons only for a few candidates: those are counted on packed bits.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float32, Int

CANDIDATES = 2  # groups that each neuron looks at in a round
LEAST_GAIN = 1e-5  # of the total, for a round to be worth another


def improve(
    active: Bool[np.ndarray, "R F"], groups: Int[np.ndarray, "n size"], *, rounds: int
) -> Int[np.ndarray, "n size"]:
    """Swap neurons between groups while that raises the co-activation within groups.

    In a round each group takes part in one swap at most, the largest gains first, so every gain is exact and the
    total only rises.

    Args:
        active: active sets of R tokens.
        groups: neurons of each group; n of at least 2.
        rounds: the most rounds.
    """
    members = groups.copy()
    count, size = groups.shape
    place = np.empty(groups.size, np.int64)
    place[members.ravel()] = np.repeat(np.arange(count), size)
    sets = np.ascontiguousarray(active.T, np.float32)  # [F, R]
    bits = _words(active)
    frequency = sets.sum(axis=1)
    together = sets @ _group_counts(sets, members)  # [F, n], counts
    for _ in range(rounds):
        gain, partner = _best_swaps(together, place, members, frequency, bits)
        changed, total = _apply(gain, partner, place, members)
        if not changed.size:
            break
        together[:, changed] = sets @ _group_counts(sets, members[changed])
        inside = together[np.arange(len(place)), place].sum() - frequency.sum()
        if total < LEAST_GAIN * inside:
            break
    return members


def _words(active: np.ndarray) -> np.ndarray:
    """Pack each neuron's tokens to 64-bit words [F, W]."""
    packed = np.packbits(active.T, axis=1)
    spare = -packed.shape[1] % 8
    return np.ascontiguousarray(np.pad(packed, ((0, 0), (0, spare)))).view(np.uint64)


def _group_counts(sets: np.ndarray, members: np.ndarray) -> Float32[np.ndarray, "R n"]:
    """Return how many neurons of each group are active at each token."""
    return np.stack([sets[group].sum(axis=0) for group in members], axis=1)


def _best_swaps(
    together: Float32[np.ndarray, "F n"],
    place: Int[np.ndarray, " F"],
    members: Int[np.ndarray, "n size"],
    frequency: Float32[np.ndarray, " F"],
    bits: np.ndarray,
) -> tuple[Float32[np.ndarray, " F"], Int[np.ndarray, " F"]]:
    """Return for each neuron the gain of its best swap, and with whom."""
    everyone = np.arange(len(place))
    own = together[everyone, place] - frequency  # co-activation with the rest of its own group
    wish = together - own[:, None]
    wish[everyone, place] = -np.inf
    looked_at = min(CANDIDATES, len(members) - 1)
    targets = np.argpartition(-wish, looked_at - 1, axis=1)[:, :looked_at]
    gain, partner = np.full(len(place), -np.inf, np.float32), np.zeros(len(place), np.int64)
    for target in targets.T:
        others = members[target]  # [F, size]
        back = together[others, place[:, None]] - own[others]
        value = wish[everyone, target][:, None] + back - 2 * _pair_counts(bits, others)
        best = value.argmax(axis=1)
        better = value[everyone, best] > gain
        gain[better] = value[everyone, best][better]
        partner[better] = others[everyone, best][better]
    return gain, partner


def _pair_counts(bits: np.ndarray, others: np.ndarray) -> Float32[np.ndarray, "F size"]:
    """Count the tokens that each neuron shares with each of its candidates."""
    counts = [np.bitwise_count(bits & bits[column]).sum(axis=1, dtype=np.int32) for column in others.T]
    return np.stack(counts, axis=1).astype(np.float32)


def _apply(
    gain: np.ndarray, partner: np.ndarray, place: np.ndarray, members: np.ndarray
) -> tuple[Int[np.ndarray, " m"], float]:
    """Swap in order of gain, each group once; return the groups that changed and the counts gained."""
    used = np.zeros(len(members), bool)
    total = 0.0
    for neuron in np.argsort(-gain, kind="stable"):
        if gain[neuron] <= 0:
            break
        other = partner[neuron]
        first, second = place[neuron], place[other]
        if used[first] or used[second]:
            continue
        used[[first, second]] = True
        members[first][members[first] == neuron] = other
        members[second][members[second] == other] = neuron
        place[neuron], place[other] = second, first
        total += 2 * float(gain[neuron])
    return np.flatnonzero(used), total
