"""Choosing by score, shared by the policies: the best few with fair ties, and the plan that gets there."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int, Shaped

from kairox_jax.balancing.contract import Costs, Plan

NOWHERE = np.empty(0, np.intp)


def top_mask(
    scores: Shaped[np.ndarray, " F"], count: int, resident: Bool[np.ndarray, " F"]
) -> Bool[np.ndarray, " F"]:
    """Return a mask of the ``count`` best scores; ties prefer residents, then the lower index."""
    if count <= 0:
        return np.zeros(scores.size, bool)
    if count >= scores.size:
        return np.ones(scores.size, bool)
    border = np.partition(scores, scores.size - count)[scores.size - count]
    chosen = scores > border
    tied = np.flatnonzero(scores == border)
    tied = tied[np.argsort(~resident[tied], kind="stable")]
    chosen[tied[: count - np.count_nonzero(chosen)]] = True
    return chosen


def best_first(ids: Int[np.ndarray, " n"], scores: Shaped[np.ndarray, " F"]) -> Int[np.ndarray, " n"]:
    """Return ascending ``ids`` by descending score; ties keep the lower index first."""
    return ids[np.argsort(-scores[ids], kind="stable")]


def worst_first(ids: Int[np.ndarray, " n"], scores: Shaped[np.ndarray, " F"]) -> Int[np.ndarray, " n"]:
    """Return ascending ``ids`` by ascending score; ties keep the lower index first."""
    return ids[np.argsort(scores[ids], kind="stable")]


def best_of(
    ids: Int[np.ndarray, " n"], scores: Shaped[np.ndarray, " n"], count: int
) -> tuple[Int[np.ndarray, " k"], Shaped[np.ndarray, " k"]]:
    """Return the ``count`` of ``ids`` with the best of their ``scores``, best first, and those scores.

    Ties are in no particular order.
    """
    chosen = _best_places(scores, count)
    if chosen is not None:
        ids, scores = ids.take(chosen), scores.take(chosen)
    order = scores.argsort()[::-1]
    return ids.take(order), scores.take(order)


def some_best(
    ids: Int[np.ndarray, " n"], scores: Shaped[np.ndarray, " n"], count: int
) -> Int[np.ndarray, " k"]:
    """Return the ids of ``best_of`` in no particular order."""
    chosen = _best_places(scores, count)
    return ids if chosen is None else ids.take(chosen)


def _best_places(scores: Shaped[np.ndarray, " n"], count: int) -> Int[np.ndarray, " k"] | None:
    """Return where the ``count`` best scores are, or None for all of them."""
    if count >= scores.size:
        return None
    return scores.argpartition(scores.size - count)[scores.size - count :] if count > 0 else NOWHERE


def some_worst(ids: Int[np.ndarray, " n"], scores: Shaped[np.ndarray, " n"], count: int) -> np.ndarray:
    """Return the ``count`` of ``ids`` with the worst of their ``scores``, in no particular order."""
    if count >= ids.size:
        return ids
    return ids.take(scores.argpartition(count)[: max(count, 0)])


def exchange(
    target: Bool[np.ndarray, " F"],
    resident: Bool[np.ndarray, " F"],
    scores: Shaped[np.ndarray, " F"],
    costs: Costs,
    limit: int | None = None,
) -> Plan:
    """Return the plan that brings ``target`` in: best loads first, the worst residents leave for them.

    Residents outside the target leave only where a load needs their slot.

    Args:
        target: who should be resident.
        resident: who is.
        scores: higher is better.
        costs: for ``max_moves`` and ``free_slots``.
        limit: a further limit on loads.
    """
    loads = best_first(np.flatnonzero(target & ~resident), scores)
    leaves = worst_first(np.flatnonzero(resident & ~target), scores)
    count = min(loads.size, costs.max_moves, costs.free_slots + leaves.size)
    if limit is not None:
        count = min(count, max(limit, 0))
    return Plan(loads[:count], leaves[: max(count - costs.free_slots, 0)])


def loads_in_window(costs: Costs, link_ms: float | None = None, fixed_ms: float | None = None) -> int:
    """Return how many records arrive before the layer's FFN starts; a link without cost takes them all.

    Args:
        costs: of the layer.
        link_ms, fixed_ms: in place of the costs' own ``link_ms_per_record`` and ``link_ms_fixed``.
    """
    link_ms = costs.link_ms_per_record if link_ms is None else link_ms
    room_ms = costs.window_ms - (costs.link_ms_fixed if fixed_ms is None else fixed_ms)
    if room_ms < 0:
        return 0
    if link_ms <= 0:
        return costs.max_moves
    return min(int(room_ms / link_ms + 1e-9), costs.max_moves)
