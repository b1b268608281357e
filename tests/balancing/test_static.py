"""The static policy moves nothing."""

import itertools

import numpy as np
import pytest

from kairox_jax.balancing import Costs, Shape, Static, Times, make_policy, share_slots


def test_nothing_moves() -> None:
    policy, shape = Static(), Shape(1, 4, 2)
    state = policy.feedback(policy.init(shape, None), None, Times(1.0, 1.0, 9.0))
    _, plan = policy.plan(state, 0, np.ones(4, bool), np.zeros(4, bool), Costs(max_moves=9, free_slots=2))
    assert plan.load.size == plan.evict.size == 0


PRIOR = np.array([[9, 8, 2, 2, 1, 1], [7, 7, 6, 6, 5, 5], [3, 3, 0, 0, 0, 0]], np.float32) / 10


def test_released_takes_the_hottest_blocks_of_all_layers() -> None:
    policy = make_policy("static", solver="released", block=2)
    assert share_slots(policy, 9, 3, 6, PRIOR).capacity.tolist() == [2, 6, 0]
    assert share_slots(policy, 9, 3, 6, None).capacity.tolist() == [3, 3, 3]


@pytest.mark.parametrize(("min_slots", "total"), [(0, 10), (4, 10), (6, 10), (3, 4), (5, 4)])
def test_papers_program_against_all_placements(min_slots: int, total: int) -> None:
    pytest.importorskip("scipy", reason="the program needs scipy")
    policy = make_policy("static", solver="paper", block=2, min_slots=min_slots)
    slots = share_slots(policy, total, 3, 6, PRIOR).capacity
    ranked = -np.sort(-PRIOR.astype(np.float64), axis=1)

    def value(counts: tuple[int, ...]) -> float:
        return sum(ranked[layer, :count].sum() for layer, count in enumerate(counts))

    possible = [
        counts
        for counts in itertools.product((0, 2, 4, 6), repeat=3)
        if sum(counts) <= total and all(count == 0 or count >= min_slots for count in counts)
    ]
    assert tuple(slots.tolist()) in possible
    assert value(tuple(slots.tolist())) == pytest.approx(max(map(value, possible)))


@pytest.mark.parametrize("params", [{"solver": "best"}, {"block": 0}, {"min_slots": -1}])
def test_bad_parameters_are_refused(params: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(params))):
        make_policy("static", **params)
