"""Each rival does what its source says, on cases small enough to follow by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kairox_jax.balancing import Costs, Plan, Shape, Times, initial_residents, make_policy, share_slots
from kairox_jax.balancing.eager import run_lengths

IO_BOUND, CPU_BOUND = Times(1.0, 9.0, 2.0), Times(1.0, 2.0, 9.0)


class Bench:
    """One layer of a policy with its residents."""

    def __init__(
        self, name: str, resident: list[int], neurons: int, prior: list | None = None, **params
    ) -> None:
        self.policy = make_policy(name, **params)
        self.slots = len(resident)
        shape = Shape(1, neurons, self.slots)
        given = None if prior is None else np.array([prior], np.float32)
        self.state = self.policy.init(shape, given)
        self.resident = np.zeros(neurons, bool)
        self.resident[resident] = True

    def step(self, active: list, **costs: float) -> Plan:
        row = np.array(active)
        row = row.astype(np.float32) if row.dtype.kind == "f" else row.astype(bool)
        free = self.slots - int(self.resident.sum())
        given = Costs(**{"max_moves": 99, "free_slots": free, **costs})  # type: ignore[arg-type]
        self.state, plan = self.policy.plan(self.state, 0, row, self.resident, given)
        self.resident[plan.evict], self.resident[plan.load] = False, True
        return plan

    def held(self) -> list[int]:
        return np.flatnonzero(self.resident).tolist()


def test_paper_keeps_the_best_scores_of_its_recursion(rng: np.random.Generator) -> None:
    bench, scores = Bench("paper", [0, 1, 2], 9), np.zeros(9)
    for _ in range(30):
        active = rng.random(9) < 0.4
        scores = 0.5 * scores + 0.5 * active
        bench.step(active.tolist())
        kept = scores[bench.resident]
        assert bench.resident.sum() == 3 and kept.min() >= np.sort(scores)[-3] - 1e-6


def test_paper_lambda_follows_the_bottleneck_within_its_bounds() -> None:
    policy = make_policy("paper", alpha=0.1, min_decay=0.4, max_decay=0.6)
    state = policy.init(Shape(2, 4, 1), None)
    state = policy.feedback(state, 0, IO_BOUND)
    state = policy.feedback(state, 1, CPU_BOUND)
    assert state.decay.tolist() == pytest.approx([0.55, 0.45])
    state = policy.feedback(state, None, CPU_BOUND)  # once a step: only recorded
    assert state.trajectory == pytest.approx([0.5])
    for _ in range(5):
        state = policy.feedback(policy.feedback(state, 0, IO_BOUND), 1, CPU_BOUND)
    assert state.decay.tolist() == pytest.approx([0.6, 0.4])
    state = policy.feedback(state, 0, Times(9.0, 1.0, 1.0))
    assert state.decay[0] == pytest.approx(0.6)


def test_paper_tau_filter() -> None:
    spike, pair = [0, 0, 1, 0], [1, 0, 1, 0]
    literal = Bench("paper", [0, 1], 4, tau_filter="literal")
    assert literal.step(spike).load.tolist() == [] and literal.held() == []  # 0.5 is not above 0.52
    literal.step(spike)
    assert literal.held() == [2]
    admission = Bench("paper", [0, 1], 4, tau_filter="admission")
    admission.step(pair)
    assert admission.held() == [0, 1]
    admission.step(pair)
    assert admission.held() == [0, 2]
    off = Bench("paper", [0, 1], 4)
    off.step(spike)
    assert off.held() == [0, 2]
    memoryless = Bench("paper", [0, 1], 4, tau_filter="literal", decay=0.0, alpha=0.0)
    memoryless.step(spike)
    assert memoryless.held() == [0, 2]  # with lambda = 0 the filter is off


def test_paper_takes_the_active_share_of_groups() -> None:
    bench = Bench("paper", [0], 3)
    bench.step([0.1, 0.6, 0.5])
    assert bench.held() == [1]
    np.testing.assert_allclose(bench.state.scores[0], [0.05, 0.3, 0.25])


def test_artifact_pairs_by_index_up_to_a_cap_that_adapts() -> None:
    bench = Bench("paper-artifact", [0, 1, 2, 3], 8, cap=2, alpha=0.5)
    plan = bench.step([0.0, 0.0, 0.0, 0.0, 0.7, 0.9, 0.8, 1.0])
    assert (plan.load.tolist(), plan.evict.tolist()) == ([4, 5], [0, 1])
    bench.state = bench.policy.feedback(bench.state, 0, CPU_BOUND)
    assert bench.policy.report(bench.state) == {"cap": 3.0}
    bench.state = bench.policy.feedback(bench.state, 0, IO_BOUND)
    assert bench.policy.report(bench.state) == {"cap": 1.5}
    prior = np.linspace(0, 1, 6)[None]
    assert (
        initial_residents(make_policy("paper-artifact"), Shape(1, 6, 2), prior)[0].tolist()
        == [True] * 2 + [False] * 4
    )


def test_layers_are_whole_or_absent() -> None:
    policy = make_policy("layers")
    shape = share_slots(policy, 25, 4, 10, None)
    assert shape.capacity.tolist() == [10, 10, 0, 0]
    assert initial_residents(policy, shape, None).sum(1).tolist() == [10, 10, 0, 0]


def test_lru_forgets_who_was_used_longest_ago() -> None:
    bench = Bench("lru", [0, 1], 4)
    bench.step([1, 0, 0, 0])
    bench.step([0, 1, 0, 0])
    assert bench.step([0, 0, 1, 0]).evict.tolist() == [0] and bench.held() == [1, 2]
    bench.step([1, 0, 0, 0])
    assert bench.held() == [0, 2]


def test_lfu_compares_counts_and_the_prior_counts_as_steps() -> None:
    bench = Bench("lfu", [0, 1], 4, [0.5, 0.25, 0.0, 0.0], prior_steps=8)  # counts 4, 2, 0, 0
    for _ in range(2):
        assert bench.step([0, 0, 1, 0]).load.size == 0  # a tie is no reason to move
    assert bench.step([0, 0, 1, 0]).load.tolist() == [2] and bench.held() == [0, 2]


@pytest.mark.parametrize("name", ["topk", "eager-lambda0"])
def test_topk_has_no_memory(name: str) -> None:
    bench = Bench(name, [0, 1], 4)
    for active in ([1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1]):
        bench.step(active)
    assert bench.held() == [2, 3]


def test_eager_loads_all_that_is_active_and_waits_for_it() -> None:
    bench = Bench("eager", [0, 1, 2, 3], 8, admit_segment=1.0)
    plan = bench.step([0, 1, 0, 0, 1, 0, 1, 0])
    assert plan.load.tolist() == [4, 6] and plan.wait == 2
    assert 1 in bench.held() and len(bench.held()) == 4


def test_eager_rejects_segments_and_reads_gaps() -> None:
    bench = Bench("eager", [0, 1, 2, 3], 12, segment=3, admit_segment=0.0)
    bench.step([0] * 5 + [1, 1, 1] + [0, 1, 0, 0])  # 5, 6, 7 are a segment, 9 is not
    bench.step([0] * 10 + [1, 1])  # two new ones: the segment's neurons leave first
    assert {9, 10, 11} <= set(bench.held())
    gaps = Bench("eager", [0, 1, 2, 3], 8, gap=1)
    plan = gaps.step([0, 0, 0, 0, 1, 0, 1, 0])
    assert (plan.load.tolist(), plan.wait) == ([4, 6, 5], 2)
    assert run_lengths(np.array([1, 1, 0, 1, 0, 1, 1, 1], bool)).tolist() == [2, 2, 0, 1, 0, 3, 3, 3]


def test_current_stops_when_the_balance_flips_or_the_window_ends() -> None:
    active = [0, 0, 0, 1, 1, 1, 1, 0]
    costs = {"cpu_ms_per_record": 1.0, "gpu_ms_per_record": 0.5, "link_ms_per_record": 0.1}
    # host 4, device 0; after 1, 2, 3 swaps 3 / 0.5, 2 / 1, 1 / 1.5: the third flips it and is the last
    assert Bench("current", [0, 1, 2, 7], 8).step(active, window_ms=9.0, **costs).load.tolist() == [3, 4, 5]
    assert Bench("current", [0, 1, 2, 7], 8).step(active, window_ms=0.25, **costs).load.tolist() == [3, 4]
    slow_device = {**costs, "gpu_ms_per_record": 50.0}
    plan = Bench("current", [3, 4], 8).step(active, window_ms=9.0, **slow_device)
    assert plan.load.tolist() == [0, 1] and plan.evict.tolist() == [3, 4]


def test_current_freq_turns_over_half_of_the_slots_at_most() -> None:
    bench = Bench("current-freq", [0, 1, 2, 3], 8)
    bench.step([1, 0, 1, 0, 0, 0, 0, 0])
    plan = bench.step([0, 0, 0, 0, 1, 1, 1, 1])
    assert plan.load.size == 2 and sorted(plan.evict.tolist()) == [1, 3]


def test_dynamic_pins_the_hottest_and_keeps_to_the_window() -> None:
    prior = [0.9, 0.8, 0.1, 0.1, 0.1, 0.1]
    bench = Bench("dynamic", [0, 1, 2, 3], 6, prior, pinned=0.5)
    active = [0, 0, 0, 0, 1, 1]
    assert bench.step(active, link_ms_per_record=1.0, window_ms=1.5).load.size == 1
    bench.step(active, link_ms_per_record=1.0, window_ms=1.5)
    assert bench.held() == [0, 1, 4, 5]


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("paper", {"tau_filter": "x"}),
        ("paper", {"decay": 1.0}),
        ("paper-artifact", {"cap": 0}),
        ("lfu", {"prior_steps": -1}),
        ("eager", {"segment": 1}),
        ("dynamic", {"pinned": 2.0}),
        ("oracle", {}),
    ],
)
def test_bad_parameters_are_refused(name: str, params: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(params), "future")):
        make_policy(name, **params)
