"""The budget planner: bytes add up, never exceed the budget, and every refusal says what to do."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kairox_jax.config import ModelConfig, PlacementConfig, parse_bytes
from kairox_jax.placement import BudgetPlan, Needs, plan_budget

MODEL = ModelConfig(
    family="llama",
    num_layers=30,
    d_model=576,
    num_neurons=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    context_length=8192,
    activation="silu",
)
NEEDS = Needs(
    dense_bytes=219_000_000,
    cache_bytes=94_000_000,
    workspace_bytes=40_000_000,
    runtime_bytes=450_000_000,
    slot_bytes=3 * 576 * 4,
)
PER_SLOT = MODEL.num_layers * NEEDS.slot_bytes
PARTS = ("dense_weights", "kv_cache", "workspace", "runtime", "slots")
sizes = st.integers(0, 2 * 10**9)
needs_of_any_model = st.builds(
    Needs,
    dense_bytes=sizes,
    cache_bytes=sizes,
    workspace_bytes=sizes,
    runtime_bytes=sizes,
    slot_bytes=st.integers(1, 100_000),
)
models_of_any_size = st.builds(
    lambda layers, neurons: replace(MODEL, num_layers=layers, num_neurons=neurons),
    st.integers(1, 80),
    st.integers(1, 20_000),
)


def plan(
    budget: int | None = None, slots: int | None = None, free: int | None = None, needs: Needs = NEEDS
) -> BudgetPlan:
    placement = PlacementConfig(vram_budget_bytes=budget, gpu_cache_neurons=slots)
    return plan_budget(MODEL, placement, needs, device_free_bytes=free)


def check_sums(made: BudgetPlan, needs: Needs, model: ModelConfig) -> None:
    parts = made.to_json()
    values = [parts[name] for name in PARTS]
    assert parts["total"] == made.total_bytes == sum(v for v in values if v is not None)
    assert parts["slots"] == made.slots_per_layer * model.num_layers * needs.slot_bytes
    assert [parts[name] for name in PARTS[:4]] == [
        needs.dense_bytes,
        needs.cache_bytes,
        needs.workspace_bytes,
        needs.runtime_bytes,
    ]
    assert parts["limit"] == made.budget_bytes


@given(
    model=models_of_any_size,
    needs=needs_of_any_model,
    budget=st.integers(1, 10**11),
    more=st.integers(0, 10**11),
    slots=st.none() | st.integers(0, 20_000),
    free=st.none() | st.integers(0, 10**11),
)
def test_a_plan_stays_within_its_budget_and_more_budget_never_gives_less(
    model: ModelConfig, needs: Needs, budget: int, more: int, slots: int | None, free: int | None
) -> None:
    made = []
    for limit in (budget, budget + more):
        placement = PlacementConfig(vram_budget_bytes=limit, gpu_cache_neurons=slots)
        try:
            one = plan_budget(model, placement, needs, device_free_bytes=free)
        except ValueError:
            made.append(None)
            continue
        check_sums(one, needs, model)
        assert one.total_bytes <= limit and 0 <= one.slots_per_layer <= model.num_neurons
        assert free is None or one.total_bytes <= free
        assert slots is None or one.slots_per_layer == slots
        if slots is None and one.slots_per_layer < model.num_neurons:
            assert one.total_bytes + model.num_layers * needs.slot_bytes > limit, "a slot more would fit"
        made.append(one.slots_per_layer)
    within = free is None or budget + more <= free
    if made[0] is not None and within:
        assert made[1] is not None and made[1] >= made[0]


def test_slots_take_what_the_budget_leaves_to_the_byte() -> None:
    assert plan(NEEDS.fixed_bytes + 10 * PER_SLOT).slots_per_layer == 10
    assert plan(NEEDS.fixed_bytes + 10 * PER_SLOT - 1).slots_per_layer == 9
    assert plan(NEEDS.fixed_bytes).slots_per_layer == 0
    assert plan(10**12).slots_per_layer == MODEL.num_neurons


def test_an_accelerator_without_a_budget_is_filled_up_to_its_free_memory() -> None:
    made = plan(free=NEEDS.fixed_bytes + 7 * PER_SLOT + 5)
    assert made.slots_per_layer == 7 and made.budget_bytes == NEEDS.fixed_bytes + 7 * PER_SLOT + 5


def test_without_accelerator_and_budget_no_neuron_has_a_slot() -> None:
    made = plan()
    assert made.slots_per_layer == 0 and made.to_json()["limit"] is None
    assert "without an accelerator" in made.table() and plan(10**12).slots_per_layer == MODEL.num_neurons


def test_a_number_of_slots_is_taken_as_asked() -> None:
    assert [plan(slots=n).slots_per_layer for n in (0, 1, 1536)] == [0, 1, 1536]
    assert plan(NEEDS.fixed_bytes + 20 * PER_SLOT, slots=3).slots_per_layer == 3


def refusal(**settings: int | None) -> str:
    with pytest.raises(ValueError) as error:
        plan(**settings)  # type: ignore[arg-type]
    return str(error.value)


def test_above_the_devices_free_memory_is_refused_with_both_sizes_and_the_remedy() -> None:
    message = refusal(budget=6_000_000_000, free=2_000_000_000)
    assert "6000.0 MB" in message and "2000.0 MB" in message
    assert "--vram-budget" in message and "smaller budget" in message


def test_above_the_devices_free_memory_prints_the_plan() -> None:
    assert "dense weights" in refusal(budget=6_000_000_000, free=2_000_000_000)


def test_below_the_dense_part_is_refused_with_the_least_and_the_plan() -> None:
    message = refusal(budget=NEEDS.fixed_bytes - 1)
    assert "too small for the dense part" in message and f"{NEEDS.fixed_bytes / 1e6:.1f} MB" in message
    assert "raise --vram-budget" in message and "--ctx-size" in message
    assert "219.0 MB" in message and "94.0 MB" in message, "the plan's table"


def test_the_least_budget_that_is_named_is_enough() -> None:
    for odd in (1, 49_999, 50_000):
        needs = replace(NEEDS, workspace_bytes=NEEDS.workspace_bytes + odd)
        with pytest.raises(ValueError) as error:
            plan_budget(MODEL, PlacementConfig(vram_budget_bytes=1000), needs, device_free_bytes=None)
        named = re.search(r"a budget of 1,000 bytes is .* at least ([\d.]+) MB", str(error.value))
        assert named is not None and float(named[1]) * 1e6 >= needs.fixed_bytes
        budget = PlacementConfig(vram_budget_bytes=round(float(named[1]) * 1e6))
        assert plan_budget(MODEL, budget, needs, device_free_bytes=None).total_bytes <= float(named[1]) * 1e6


def test_a_device_that_is_too_small_is_refused_without_a_budget() -> None:
    assert "too small for the dense part" in refusal(free=NEEDS.fixed_bytes - 1)
    assert "too small for the dense part" in refusal(free=0)


def test_too_small_for_the_slots_asked_for_names_them() -> None:
    message = refusal(budget=NEEDS.fixed_bytes + 5 * PER_SLOT, slots=6)
    assert "6 slots a layer" in message and "--gpu-cache-neurons" in message
    assert f"{(NEEDS.fixed_bytes + 6 * PER_SLOT) / 1e6:.1f} MB" in message


@pytest.mark.parametrize("slots", [1537, 10**9])
def test_more_slots_than_neurons_are_refused(slots: int) -> None:
    message = refusal(slots=slots)
    assert str(slots) in message and "1536 neurons" in message and "at most" in message


def test_table_names_every_part_and_the_reason() -> None:
    table = plan(10**9).table()
    for part in (*PARTS, "total", "limit"):
        assert part.replace("_", " ") in table
    assert "of 1536 neurons" in table and "what the budget leaves" in table


@pytest.mark.parametrize(("text", "size"), [("6 GB", 6 * 10**9), ("6GiB", 6 * 2**30), ("6e9", 6 * 10**9)])
def test_replay_10_sizes_as_written_are_parsed(text: str, size: int) -> None:
    made = plan(parse_bytes(text))
    assert made.budget_bytes == size and made.total_bytes <= size


@pytest.mark.parametrize("budget", [0, -1, -(10**9)])
def test_replay_10_zero_and_negative_budgets_are_refused(budget: int) -> None:
    with pytest.raises(ValueError, match=f"--vram-budget {budget} must be above zero"):
        PlacementConfig(vram_budget_bytes=budget)
