"""The event simulator against hand-computed tokens, and what must hold for every policy and trace."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kairox_jax.balancing import POLICIES, Costs, Plan, Shape, initial_residents, make_policy
from kairox_jax.sim.events import Simulator
from kairox_jax.sim.machine import LayerCosts

COSTS = LayerCosts(
    attention_ms=1.0,
    gpu_ms_per_neuron=0.1,
    gpu_ms_second=0.05,
    cpu_ms_per_neuron=2.0,
    cpu_ms_fixed=0.5,
    link_ms_fixed=0.25,
    link_ms_per_record=1.0,
    head_ms=0.75,
    record_bytes=100.0,
    layer_scale=2.0,
    dense_gpu_ms=1.0,
    dense_cpu_ms=1.0,
    dense_slots=1.0,
)


class Scripted:
    """Loads what it is told, once, and remembers the costs that it saw."""

    def __init__(self, load: list[int], evict: list[int], wait: int = 0) -> None:
        self.plan_once, self.seen = Plan(np.array(load, int), np.array(evict, int), wait), []

    def init(self, shape: Shape, prior: object) -> list:
        return []

    def plan(self, state: list, layer: int, active: object, resident: object, costs: Costs) -> tuple:
        self.seen.append(costs)
        nothing = Plan(np.empty(0, int), np.empty(0, int))
        return state, self.plan_once if len(self.seen) == 1 else nothing

    def feedback(self, state: list, layer: int | None, times: object) -> list:
        return state


def simulate(policy: Scripted, can_wait: bool = True, steps: int = 1) -> list:
    shape, resident = Shape(1, 4, 2), np.array([[1, 1, 0, 0]], bool)
    simulator = Simulator(policy, shape, resident, None, COSTS, can_wait=can_wait, debug=True)  # type: ignore[arg-type]
    return [simulator.step(np.array([[1, 0, 1, 1]], bool)) for _ in range(steps)]


def test_a_token_without_moves() -> None:
    policy = Scripted([], [])
    (record,) = simulate(policy)
    # head 0.75 + 2 layers x (attention 1 + max(device 0.1, host 2 x 2 + 0.5)); window = head + attention
    assert record.step_ms == pytest.approx(0.75 + 2 * (1 + 4.5))
    assert (record.hits, record.active, record.promoted) == (1, 3, 0)
    assert record.cpu_ms == pytest.approx(9.0) and record.gpu_ms == pytest.approx(0.75 + 2 * 1.1)
    assert policy.seen[0].window_ms == pytest.approx(1.75)
    assert policy.seen[0].max_moves == 4 and policy.seen[0].free_slots == 0


def test_what_arrives_in_the_window_is_a_hit() -> None:
    (record,) = simulate(Scripted([2], [1]))
    assert (record.hits, record.late, record.evicted, record.wasted) == (2, 0, 1, 0)
    assert record.step_ms == pytest.approx(0.75 + 2 * (1 + 2.5))
    assert record.io_ms == pytest.approx(2 * 1.25)


def test_what_is_late_goes_to_the_host_and_hits_at_the_next_token() -> None:
    first, second = simulate(Scripted([2, 3], [1, 0]), steps=2)  # arrivals at 1.25 and 2.25, FFN at 1.75
    assert (first.hits, first.late) == (1, 1) and first.step_ms == pytest.approx(0.75 + 2 * (1 + 4.5))
    assert (second.hits, second.late) == (2, 0)


def test_waiting_holds_the_device_back_not_the_host() -> None:
    (record,) = simulate(Scripted([2, 3], [1, 0], wait=2))
    # host: 2.5 from the start; device: 0.1 early, waits until 0.5 after the start, 0.1 late + 0.05
    assert record.hits == 2 and record.step_ms == pytest.approx(0.75 + 2 * (1 + 2.5))
    (record,) = simulate(Scripted([2, 3], [1, 0], wait=2), can_wait=False)
    assert record.hits == 1


@pytest.mark.parametrize(("loaded", "wasted"), [(1, 1), (2, 0)])
def test_evicted_unused_promotions_are_counted(loaded: int, wasted: int) -> None:
    policy = Scripted([loaded], [0])
    shape, resident = Shape(1, 4, 1), np.array([[1, 0, 0, 0]], bool)
    simulator = Simulator(policy, shape, resident, None, COSTS, debug=True)  # type: ignore[arg-type]
    active = np.array([[1, 0, 1, 1]], bool)  # neuron 1 is never used
    assert (simulator.step(active).promoted, simulator.cache.resident[0].tolist()[loaded]) == (1, True)
    simulator.policy = Scripted([3], [loaded])  # type: ignore[assignment]
    assert simulator.step(active).wasted == wasted


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"layers", "oracle"}))
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), group=st.sampled_from([1, 4]), can_wait=st.booleans())
def test_counts_add_up_for_every_policy(name: str, seed: int, group: int, can_wait: bool) -> None:
    rng = np.random.default_rng(seed)
    shape, policy = Shape(2, 16, rng.integers(0, 17, 2)), make_policy(name)
    prior = rng.random((2, 16)).astype(np.float32)
    resident = initial_residents(policy, shape, prior)
    simulator = Simulator(policy, shape, resident, prior, COSTS, group, can_wait=can_wait, debug=True)
    for _ in range(10):
        counts = rng.random((2, 16)) < 0.4 if group == 1 else rng.integers(0, group + 1, (2, 16))
        record = simulator.step(counts)
        held = simulator.cache.resident.sum(1)
        assert record.active == counts.sum() and 0 <= record.hits <= record.active
        assert (held <= shape.capacity).all() and (held == simulator.cache.held).all()
        on_host = record.active - record.hits
        fixed = record.cpu_ms / COSTS.layer_scale - on_host * COSTS.cpu_ms_per_neuron
        assert fixed == pytest.approx(0.5 * round(fixed / 0.5), abs=1e-6) and fixed <= 1.0 + 1e-6
        assert record.step_ms >= COSTS.head_ms + COSTS.layer_scale * 2 * COSTS.attention_ms - 1e-9
