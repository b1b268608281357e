"""The minimiser against brute force, the momentum against its definition, and what split moves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kairox_jax.balancing import Costs, Shape, Split, Times
from kairox_jax.balancing.minimiser import best_count, best_whole_count, layer_time
from kairox_jax.balancing.momentum import BLOCK, new_momentum

MS = st.sampled_from([0.0, 0.001, 0.01, 0.02, 0.3])


def brute_force(costs: Costs, host: float, device: float, moved: np.ndarray) -> list[float]:
    """The time of a layer for each number of moves, written from the contract's words with loops."""
    arrivals = [costs.link_ms_fixed + k * costs.link_ms_per_record for k in range(1, len(moved))]
    in_time = sum(arrival <= costs.window_ms + 1e-9 for arrival in arrivals)
    times = []
    for k, taken in enumerate(moved):
        left = host - taken
        host_ms = left * costs.cpu_ms_per_record + (costs.cpu_ms_fixed if left > 0 else 0.0)
        if k <= in_time:
            device_ms = (device + taken) * costs.gpu_ms_per_record
        else:
            first = (device + moved[in_time]) * costs.gpu_ms_per_record
            wait = arrivals[k - 1] - costs.window_ms
            late = (taken - moved[in_time]) * costs.gpu_ms_per_record + costs.gpu_ms_second
            device_ms = max(first, wait) + late
        times.append(max(host_ms, device_ms))
    return times


@settings(max_examples=300, deadline=None)
@given(
    cpu=MS,
    gpu=MS,
    link=st.sampled_from([0.003, 0.01, 0.1]),
    fixed=MS,
    second=MS,
    cpu_fixed=MS,
    window=st.sampled_from([-0.5, 0.0, 0.05, 0.5, 3.0]),
    host=st.integers(0, 40),
    device=st.integers(0, 40),
    limit=st.integers(0, 40),
)
def test_count_is_the_least_time_of_all(
    cpu: float,
    gpu: float,
    link: float,
    fixed: float,
    second: float,
    cpu_fixed: float,
    window: float,
    host: int,
    device: int,
    limit: int,
) -> None:
    limit = min(limit, host)
    costs = Costs(
        max_moves=1000,
        free_slots=0,
        gpu_ms_per_record=gpu,
        cpu_ms_per_record=cpu,
        link_ms_per_record=link,
        link_ms_fixed=fixed,
        window_ms=window,
        can_wait=True,
        gpu_ms_second=second,
        cpu_ms_fixed=cpu_fixed,
    )
    times = brute_force(costs, host, device, np.arange(limit + 1.0))
    time = layer_time(costs, 1.0, 1.0)
    whole = best_whole_count(time, host, device, limit)
    assert times[whole] <= min(times) + 1e-9
    assert times[best_count(time, host, device, np.arange(limit + 1.0))] <= min(times) + 1e-9
    halves = np.cumsum(np.concatenate(([0.0], np.tile([0.9, 0.2], limit)[:limit])))
    times = brute_force(costs, host, device, halves)
    assert times[best_count(time, host, device, halves)] <= min(times) + 1e-9


def test_momentum_is_the_decayed_mean_also_after_rescaling(rng: np.random.Generator) -> None:
    prior = rng.random((1, 5)).astype(np.float32)
    momentum = new_momentum(Shape(1, 5, 2), prior, 0.9, 16.0)
    counts, total = 16.0 * prior[0].astype(np.float64), 16.0
    for _ in range(400 // BLOCK):  # 0.9 ** -400 = 2e18: the weight is rescaled several times
        block = rng.random((BLOCK, 5)) < 0.4
        for active in block:
            momentum.add(0, active)
        counts = 0.9**BLOCK * counts + block.sum(0)
        total = 0.9**BLOCK * total + BLOCK
    np.testing.assert_allclose(momentum.table[0] * momentum.factor(0), counts / total, rtol=1e-5)


def test_shares_reach_the_momentum_at_once_and_whole_steps_before_them(rng: np.random.Generator) -> None:
    momentum = new_momentum(Shape(1, 5, 2), np.zeros((1, 5), np.float32), 0.9, 16.0)
    whole, share = rng.random(5) < 0.5, rng.random(5).astype(np.float32)
    momentum.add(0, whole)
    assert not momentum.table.any()
    momentum.add(0, share)
    want = (0.9 * whole + share) / (16 * 0.81 + 0.9 + 1)
    np.testing.assert_allclose(momentum.table[0] * momentum.factor(0), want, rtol=1e-5)


def plan_once(active: np.ndarray, resident: np.ndarray, prior: np.ndarray, **costs: float) -> tuple:
    policy, shape = Split(), Shape(1, active.size, int(resident.sum()))
    given_costs = Costs(**{"max_moves": 99, "free_slots": 0, "link_ms_per_record": 1.0, **costs})  # type: ignore[arg-type]
    _, plan = policy.plan(policy.init(shape, prior[None]), 0, active, resident, given_costs)
    return plan.load.tolist(), sorted(plan.evict.tolist()), plan.wait


ACTIVE = np.array([1, 1, 1, 0, 0, 0, 1, 0], bool)
RESIDENT = np.array([0, 0, 0, 1, 1, 1, 1, 0], bool)
PRIOR = np.array([0.2, 0.9, 0.5, 0.3, 0.1, 0.8, 0.5, 0.0])


def test_window_full_of_the_best_reuse_for_the_least_reuse() -> None:
    load, evict, wait = plan_once(ACTIVE, RESIDENT, PRIOR, window_ms=2.5, cpu_ms_per_record=0.1)
    assert (sorted(load), evict, wait) == ([1, 2], [3, 4], 0)


def test_a_slow_host_makes_the_layer_wait_and_a_fast_one_does_not() -> None:
    costs = {"window_ms": 1.0, "cpu_ms_per_record": 50.0, "can_wait": True}
    assert plan_once(ACTIVE, RESIDENT, PRIOR, **costs) == ([1, 2, 0], [3, 4, 5], 3)
    assert plan_once(ACTIVE, RESIDENT, PRIOR, **{**costs, "cpu_ms_per_record": 0.1})[2] == 0
    assert plan_once(ACTIVE, RESIDENT, PRIOR, **{**costs, "can_wait": False}) == ([1], [4], 0)


def test_nothing_moves_when_the_device_is_the_bottleneck() -> None:
    load, evict, _ = plan_once(
        ACTIVE, RESIDENT, PRIOR, window_ms=9.0, cpu_ms_per_record=0.001, gpu_ms_per_record=1.0
    )
    assert load == evict == []


def test_shares_let_a_fuller_group_replace_a_partly_active_one() -> None:
    share = np.array([0.9, 0.1, 0.2, 0.8], np.float32)
    resident = np.array([0, 1, 1, 1], bool)
    assert plan_once(share, resident, np.full(4, 0.3), window_ms=5.0, cpu_ms_per_record=0.1) == ([0], [1], 0)


def test_what_is_not_foreseen_moves_only_for_who_is_less_likely() -> None:
    """0.9 and 0.5, active, for 0.1 and 0.3; 0.2 with 0.1 for its activity is no likelier than 0.8."""
    costs = {"window_ms": 9.0, "cpu_ms_per_record": 0.1, "foreseen": False}
    assert plan_once(ACTIVE, RESIDENT, PRIOR, **costs)[:2] == ([1, 2], [3, 4])


def test_a_price_keeps_loads_that_do_not_earn_it_back() -> None:
    prior, moved = np.array([0.9, 0.6, 0.5, 0.3]), {}
    resident, active = np.array([0, 0, 1, 1], bool), np.array([1, 1, 0, 0], bool)
    costs = Costs(max_moves=9, free_slots=0, link_ms_per_record=0.1, window_ms=9.0, cpu_ms_per_record=1.0)
    for price in (
        0.0,
        1.5,
        3.0,
        20.0,
    ):  # gains in ten steps: 1 + 10 * (0.9 - 0.3) and 1 + 10 * (0.6 - 0.5), less 6 %
        policy = Split(price=price)
        state = policy.init(Shape(1, 4, 2), prior[None])
        moved[price] = policy.plan(state, 0, active, resident, costs)[1].load.tolist()
    assert [sorted(moved[price]) for price in (0.0, 1.5, 3.0, 20.0)] == [[0, 1], [0, 1], [0], []]


def test_idle_link_moves_only_beyond_the_margin() -> None:
    policy, shape = Split(margin=0.1), Shape(1, 4, 2)
    resident, active = np.array([1, 1, 0, 0], bool), np.zeros(4, bool)
    state = policy.init(shape, np.array([[0.5, 0.2, 0.25, 0.6]]))
    costs = Costs(max_moves=9, free_slots=0, link_ms_per_record=0.1, window_ms=9.0, cpu_ms_per_record=1.0)
    moves = []
    for _ in range(64):
        state, plan = policy.plan(state, 0, active, resident, costs)
        moves += [(plan.load.tolist(), plan.evict.tolist())] if plan.load.size else []
        resident[plan.evict], resident[plan.load] = False, True
    assert moves == [([3], [1])]  # 0.25 for 0.2 (and later nothing) is not worth the transfer


def test_what_costs_the_step_more_than_it_saves_stays() -> None:
    """Two loads save two records now, and 10 * (0.9 + 0.5 - 0.1 - 0.3) later, each 0.1 ms."""
    costs = {"window_ms": 2.5, "cpu_ms_per_record": 0.1}
    for per_step, moves in (({"step_ms_fixed": 1.1}, 2), ({"step_ms_fixed": 1.3}, 0)):
        assert len(plan_once(ACTIVE, RESIDENT, PRIOR, **costs, **per_step)[0]) == moves
    assert len(plan_once(ACTIVE, RESIDENT, PRIOR, **costs, step_ms_per_record=0.55)[0]) == 2
    assert plan_once(ACTIVE, RESIDENT, PRIOR, **costs, step_ms_per_record=0.65) == ([], [], 0)
    unlikely = np.array([0.1, 0.1, 0.1, 0.9, 0.9, 0.9, 0.5, 0.0])  # but active: its hits alone must pay
    for fixed, moves in ((0.15, 2), (0.25, 0)):
        assert len(plan_once(ACTIVE, RESIDENT, unlikely, **costs, step_ms_fixed=fixed)[0]) == moves
    unforeseen = {**costs, "window_ms": 9.0, "foreseen": False}
    assert len(plan_once(ACTIVE, RESIDENT, PRIOR, **unforeseen, step_ms_fixed=0.9)[0]) == 2
    assert plan_once(ACTIVE, RESIDENT, PRIOR, **unforeseen, step_ms_fixed=1.1)[0] == []


def test_costs_follow_the_measured_times_and_outliers_hardly_matter() -> None:
    policy, shape = Split(), Shape(1, 8, 4)
    state = policy.init(shape, PRIOR[None])
    costs = Costs(max_moves=9, free_slots=0, link_ms_per_record=0.1, window_ms=0.25, cpu_ms_per_record=1.0)
    for step in range(400):
        state, plan = policy.plan(state, 0, ACTIVE, RESIDENT, costs)
        left = 3 - plan.load.size
        outlier = 100.0 if step % 25 == 24 else 1.0
        state = policy.feedback(state, 0, Times(0.1, 0.3 * plan.load.size, 0.5 * left * outlier))
    report = policy.report(state)
    assert report["cpu_factor"] == pytest.approx(0.5, rel=0.2)
    assert plan.load.size == 0  # a link of three times its cost carries nothing in this window


@pytest.mark.parametrize(
    "params",
    [
        {"decay": 1.0},
        {"reuse": 0.0},
        {"again": -0.1},
        {"price": -1.0},
        {"margin": -1.0},
        {"prior_steps": 0.0},
    ],
)
def test_bad_parameters_are_refused(params: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(params))):
        Split(**params)
