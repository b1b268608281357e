"""The contract's values are validated, and check_plan notices each broken rule."""

import numpy as np
import pytest

from kairox_jax.balancing import Costs, Plan, Shape, check_plan


def test_capacity_is_broadcast_and_frozen() -> None:
    shape = Shape(3, 8, 5)
    assert shape.capacity.tolist() == [5, 5, 5]
    assert Shape(3, 8, np.array([0, 8, 1])).capacity.tolist() == [0, 8, 1]
    with pytest.raises(ValueError):
        shape.capacity[0] = 1


@pytest.mark.parametrize("capacity", [9, -1, [1, 2], 2.5, [1, 2, 9]])
def test_bad_capacity_is_refused(capacity: object) -> None:
    with pytest.raises(ValueError, match="capacity"):
        Shape(3, 8, np.asarray(capacity))


@pytest.mark.parametrize("sizes", [(0, 8), (3, 0), (-1, 8)])
def test_bad_sizes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="above zero"):
        Shape(*sizes, 0)


def test_negative_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="max_moves -1"):
        Costs(max_moves=-1, free_slots=0)


def test_plan_is_a_pair_of_int32() -> None:
    plan = Plan(np.array([3, 1]), np.array([2]), wait=1)
    load, evict = plan
    assert load.dtype == evict.dtype == np.int32
    assert (load.tolist(), evict.tolist(), plan.wait) == ([3, 1], [2], 1)


RESIDENT = np.array([1, 1, 0, 0, 0], bool)


@pytest.mark.parametrize(
    ("load", "evict", "wait", "rule"),
    [
        ([5], [], 0, "outside"),
        ([], [-1], 0, "outside"),
        ([2, 2], [], 0, "twice"),
        ([2], [2], 0, "twice"),
        ([1], [], 0, "loads a resident"),
        ([], [4], 0, "not resident"),
        ([2, 3, 4], [0, 1], 0, "max_moves"),
        ([2, 3], [], 0, "free"),
        ([2], [], 2, "waits"),
    ],
)
def test_check_plan_names_the_broken_rule(load: list, evict: list, wait: int, rule: str) -> None:
    costs = Costs(max_moves=2, free_slots=1)
    with pytest.raises(ValueError, match=rule):
        check_plan(Plan(np.array(load, int), np.array(evict, int), wait), Shape(1, 5, 3), 0, RESIDENT, costs)


def test_check_plan_knows_the_capacity() -> None:
    plan = Plan(np.array([2, 3]), np.array([0]))
    check_plan(plan, Shape(1, 5, 3), 0, RESIDENT, Costs(max_moves=2, free_slots=1))
    with pytest.raises(ValueError, match="exceed the 2 slots"):
        check_plan(plan, Shape(1, 5, 2), 0, RESIDENT, Costs(max_moves=2, free_slots=1))
