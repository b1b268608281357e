"""The policy ``guide`` follows the guide: its scores, its balancer, and its own demonstration run."""

import numpy as np
import pytest
from guide_listing import GuideListing, demonstration

from kairox_jax.balancing import Costs, Guide, Shape, Times
from kairox_jax.balancing.guide import balance


def run(policy: Guide, fires: list[int], slots: int = 4, max_moves: int = 64) -> tuple[list, list]:
    """Return momentum of neuron 0 and whether it is resident after each step."""
    shape = Shape(1, 8, slots)
    state, resident = policy.init(shape, None), np.zeros(8, bool)
    scores, placed = [], []
    for fire in fires:
        active = np.zeros(8, bool)
        active[0] = fire
        free = slots - int(resident.sum())
        state, plan = policy.plan(state, 0, active, resident, Costs(max_moves=max_moves, free_slots=free))
        resident[plan.evict], resident[plan.load] = False, True
        scores.append(float(state.momentum[0, 0]))
        placed.append(bool(resident[0]))
    return scores, placed


def test_spike_is_never_promoted() -> None:
    scores, placed = run(Guide(), [1, 0, 0, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(scores, 0.1 * 0.9 ** np.arange(8), rtol=1e-6)
    assert not any(placed)


def test_sustained_neuron_crosses_at_step_five() -> None:
    scores, placed = run(Guide(), [1] * 8)
    np.testing.assert_allclose(scores, 1 - 0.9 ** np.arange(1, 9), rtol=1e-6)
    assert np.round(scores[:5], 3).tolist() == [0.1, 0.19, 0.271, 0.344, 0.41]
    assert placed == [False] * 4 + [True] * 4


def test_stale_resident_is_evicted_below_the_threshold() -> None:
    scores, placed = run(Guide(), [1] * 5 + [0] * 20)
    first_out = placed.index(False, 5)
    assert scores[first_out] < 0.08 <= scores[first_out - 1]
    assert all(placed[4:first_out]) and not any(placed[first_out:])


# From the formulas by hand: 1 - 0.05 * (30 - 10) / 30, 1 + 0.08 * (12 - 9) / 12, ...
@pytest.mark.parametrize(
    ("modifier", "times", "expected"),
    [
        (1.0, (8.0, 10.0, 30.0), 0.9666666666666667),
        (1.0, (10.0, 2.0, 30.0), 0.9666666666666667),
        (1.0, (9.0, 12.0, 3.0), 1.02),
        (1.0, (9.0, 9.0, 9.0), 1.0),
        (1.0, (9.0, 3.0, 4.0), 1.0),
        (0.42, (0.0, 0.0, 5.0), 0.40),
        (1.95, (0.0, 5.0, 0.0), 2.00),
        (1.0, (0.0, 0.0, 0.0), 1.0),
    ],
)
def test_balancer_to_the_last_digit(modifier: float, times: tuple, expected: float) -> None:
    assert balance(modifier, Times(*times)) == expected


def test_balancer_runs_once_a_step_and_can_be_off() -> None:
    shape, times = Shape(2, 4, 2), Times(0.0, 0.0, 5.0)
    state = Guide().init(shape, None)
    state = Guide().feedback(state, 0, times)
    assert state.modifier == 1.0
    assert Guide().feedback(state, None, times).modifier == 0.95
    assert Guide(anb=False).feedback(Guide().init(shape, None), None, times).modifier == 1.0


def test_demonstration_step_by_step() -> None:
    policy, listing, shape = Guide(), GuideListing(4, 4096, 500), Shape(4, 4096, 500)
    state, resident = policy.init(shape, None), np.zeros((4, 4096), bool)
    promoted_total = 0
    for step in demonstration():
        expected, hits = listing.step(step), 0
        for layer, ids in enumerate(step):
            active = np.zeros(4096, bool)
            active[ids] = True
            costs = Costs(max_moves=4096, free_slots=500 - int(resident[layer].sum()))
            state, plan = policy.plan(state, layer, active, resident[layer], costs)
            assert plan.load.tolist() == expected["promoted"][layer]
            assert plan.evict.tolist() == expected["evicted"][layer]
            resident[layer, plan.evict], resident[layer, plan.load] = False, True
            hits += int((active & resident[layer]).sum())
            promoted_total += plan.load.size
        np.testing.assert_array_equal(state.momentum, np.stack(listing.scores))
        assert hits == expected["hits"]
        state = policy.feedback(state, None, Times(*expected["times"]))
        assert state.modifier == expected["modifier"]
    assert promoted_total >= 600 and state.modifier < 1.0


def test_max_moves_limits_promotions_to_the_best() -> None:
    shape, policy = Shape(1, 8, 8), Guide(beta=0.0)
    shares = np.array([0.4, 0.9, 0.4, 0.8, 0.0, 0.0, 0.0, 0.36], np.float32)
    costs = Costs(max_moves=3, free_slots=8)
    _, plan = policy.plan(policy.init(shape, None), 0, shares, np.zeros(8, bool), costs)
    assert plan.load.tolist() == [1, 3, 0]  # the tie of 0 and 2 goes to the lower index


def test_warm_start_takes_the_prior_as_momentum() -> None:
    prior = np.linspace(0, 1, 8, dtype=np.float64)[None]
    np.testing.assert_allclose(Guide(warm_start=True).init(Shape(1, 8, 2), prior).momentum, prior, rtol=1e-6)
    assert not Guide().init(Shape(1, 8, 2), prior).momentum.any()


@pytest.mark.parametrize(
    "params", [{"beta": 1.0}, {"beta": -0.1}, {"promote_threshold": 0.0}, {"evict_threshold": 0.5}]
)
def test_bad_parameters_are_refused(params: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(params))):
        Guide(**params)
