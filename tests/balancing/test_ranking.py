"""Choosing by score against sorting in Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kairox_jax.balancing import Costs
from kairox_jax.balancing.ranking import best_of, exchange, loads_in_window, some_worst, top_mask


@settings(max_examples=200, deadline=None)
@given(
    scores=st.lists(st.integers(0, 4), min_size=1, max_size=20),
    count=st.integers(-1, 21),
    seed=st.integers(0, 99),
)
def test_top_mask_prefers_residents_then_the_lower_index(scores: list, count: int, seed: int) -> None:
    row = np.array(scores, np.float32)
    resident = np.random.default_rng(seed).random(row.size) < 0.5
    ranked = sorted(range(row.size), key=lambda i: (-row[i], not resident[i], i))
    assert np.flatnonzero(top_mask(row, count, resident)).tolist() == sorted(ranked[: max(count, 0)])


@settings(max_examples=100, deadline=None)
@given(scores=st.lists(st.integers(0, 9), max_size=20, unique=True), count=st.integers(-1, 21))
def test_best_and_worst(scores: list, count: int) -> None:
    values = np.array(scores, np.float32)
    ids = np.arange(values.size) * 3
    count = max(count, 0)
    expected = sorted(zip(ids.tolist(), scores, strict=True), key=lambda pair: -pair[1])
    best, best_scores = best_of(ids, values, count)
    assert list(zip(best.tolist(), best_scores.tolist(), strict=True)) == expected[:count]
    worst = some_worst(ids, values, count).tolist()
    assert sorted(worst) == sorted(pair[0] for pair in expected[::-1][:count])


def test_exchange_takes_the_best_and_evicts_only_for_a_load() -> None:
    scores = np.array([5, 1, 9, 7, 2, 8], np.float32)
    resident, target = np.array([1, 1, 0, 0, 1, 0], bool), np.array([1, 0, 1, 1, 0, 1], bool)
    plan = exchange(target, resident, scores, Costs(max_moves=9, free_slots=1))
    assert (plan.load.tolist(), plan.evict.tolist()) == ([2, 5, 3], [1, 4])
    plan = exchange(target, resident, scores, Costs(max_moves=2, free_slots=1))
    assert (plan.load.tolist(), plan.evict.tolist()) == ([2, 5], [1])
    plan = exchange(target, resident, scores, Costs(max_moves=9, free_slots=1), limit=1)
    assert (plan.load.tolist(), plan.evict.tolist()) == ([2], [])


@pytest.mark.parametrize(
    ("link", "fixed", "window", "expected"),
    [
        (0.1, 0.05, 0.35, 3),
        (0.1, 0.05, 0.04, 0),
        (0.1, 0.0, -1.0, 0),
        (0.0, 0.0, 0.0, 7),
        (0.001, 0.0, 1.0, 7),
    ],
)
def test_loads_in_window(link: float, fixed: float, window: float, expected: int) -> None:
    costs = Costs(max_moves=7, free_slots=0, link_ms_per_record=link, link_ms_fixed=fixed, window_ms=window)
    assert loads_in_window(costs) == expected
