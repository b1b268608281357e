"""What holds for every policy in the table, on random activations, residents and costs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kairox_jax.balancing import POLICIES, Costs, Shape, Times, check_plan, initial_residents, make_policy

LAYERS, NEURONS = 2, 24


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_plan_keeps_the_invariants(name: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    capacity = np.array(data.draw(st.lists(st.integers(0, NEURONS), min_size=LAYERS, max_size=LAYERS)))
    shape = Shape(LAYERS, NEURONS, capacity)
    prior = rng.random((LAYERS, NEURONS)) if data.draw(st.booleans()) else None
    future = rng.random((16, LAYERS, NEURONS)) < 0.3
    known = {"future": lambda step: future[step] if step < 16 else None} if name == "oracle" else {}
    policy = make_policy(name, **known)
    state, resident = policy.init(shape, prior), initial_residents(policy, shape, prior)
    assert (resident.sum(1) <= capacity).all()
    for _ in range(data.draw(st.integers(1, 12))):
        for layer in range(LAYERS):
            active = rng.random(NEURONS) < data.draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
            if data.draw(st.booleans()):
                active = (active * rng.random(NEURONS)).astype(np.float32)
            held = int(resident[layer].sum())
            costs = Costs(
                max_moves=data.draw(st.sampled_from([0, 1, 5, NEURONS])),
                free_slots=int(capacity[layer]) - held,
                gpu_ms_per_record=0.001,
                can_wait=data.draw(st.booleans()),
                cpu_ms_per_record=data.draw(st.sampled_from([0.0, 0.02, 1.0])),
                link_ms_per_record=data.draw(st.sampled_from([0.0, 0.005, 1.0])),
                link_ms_fixed=data.draw(st.sampled_from([0.0, 0.01])),
                window_ms=data.draw(st.sampled_from([-1.0, 0.0, 0.05, 10.0])),
                record_bytes=1000,
            )
            before = resident[layer].copy()
            state, plan = policy.plan(state, layer, active, resident[layer], costs)
            np.testing.assert_array_equal(resident[layer], before)  # the caller's array is not touched
            check_plan(plan, shape, layer, resident[layer], costs)
            resident[layer, plan.evict], resident[layer, plan.load] = False, True
            state = policy.feedback(state, layer, Times(*rng.random(3)))
        state = policy.feedback(state, None, Times(*rng.random(3)))
    assert (resident.sum(1) <= capacity).all()


def test_unknown_names_and_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="'gide' is unknown.*guide.*static"):
        make_policy("gide")
    with pytest.raises(ValueError, match="no parameter 'gamma'.*beta"):
        make_policy("guide", gamma=1)
    with pytest.raises(ValueError, match="no parameter 'beta'"):
        make_policy("static", beta=1)


def test_parameters_reach_the_policy() -> None:
    assert make_policy("guide", beta=0.5).beta == 0.5  # type: ignore[attr-defined]
