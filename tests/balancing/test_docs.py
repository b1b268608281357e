"""The policy that docs/policies.md shows runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kairox_jax.balancing import POLICIES, Costs, Shape, check_plan, initial_residents, make_policy
from kairox_jax.io.trace import read_trace
from kairox_jax.sim import ReplaySettings, replay

TESTS = Path(__file__).parents[1]


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register the documented class as "steady"; it has at most 40 lines."""
    text = (TESTS.parent / "docs" / "policies.md").read_text()
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    code = found.group(1)
    assert len([line for line in code.splitlines() if line]) <= 40
    names: dict[str, Any] = {}
    exec(compile(code, "docs/policies.md", "exec"), names)
    monkeypatch.setitem(POLICIES, "steady", names["Steady"])
    return "steady"


@pytest.mark.parametrize("capacity", [0, 3, 24])
def test_its_plans_can_be_carried_out(steady: str, capacity: int, rng: np.random.Generator) -> None:
    shape, policy = Shape(2, 24, capacity), make_policy(steady)
    prior = rng.random((2, 24))
    state, resident = policy.init(shape, prior), initial_residents(policy, shape, None)
    resident[0, :2] = False
    for _ in range(30):
        for layer in range(2):
            held = int(resident[layer].sum())
            costs = Costs(max_moves=int(rng.integers(0, 3)), free_slots=capacity - held)
            state, plan = policy.plan(state, layer, rng.random(24) < 0.3, resident[layer], costs)
            check_plan(plan, shape, layer, resident[layer], costs)
            resident[layer, plan.evict], resident[layer, plan.load] = False, True


def test_it_replays_and_learns(steady: str) -> None:
    trace = read_trace(TESTS / "data" / "traces" / "smollm2-prose.npz")
    prior = np.zeros((trace.num_layers, trace.num_neurons), np.float32)
    settings: dict[str, Any] = {"hardware": "pc-high", "capacity": 0.3, "steps": 40, "debug": True}
    hit = {
        name: replay([trace], ReplaySettings(policy=name, **settings), [prior]).totals()
        for name in ("static", steady)
    }
    assert 0 < hit[steady]["loads_per_layer_step"] <= 1
    assert hit[steady]["hit_rate"] > hit["static"]["hit_rate"] + 0.01
