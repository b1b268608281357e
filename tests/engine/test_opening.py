"""Opening and closing an engine on a tiny model: what is refused, and what the plan promises."""

import pytest
from tiny_model import GREEDY, MODELS, TINY, hybrid_of, tiny_engine

from kairox_jax.config import PlacementConfig
from kairox_jax.engine import Engine
from kairox_jax.io import Checkpoint

CONTEXT = 64


@pytest.mark.parametrize("name", ["relu-llama", "opt"])
def test_replay_10_the_arrays_stay_within_the_budget(name: str) -> None:
    """What is really allocated for slots, biases included, is what the plan says."""
    with tiny_engine(MODELS / name, vram_budget_bytes=2_000_000, context_length=CONTEXT) as engine:
        hybrid = hybrid_of(engine)
        slots = sum(a.nbytes for layer in hybrid.migrator.slots for a in layer)
        slots += sum(biases.nbytes for biases in hybrid._slot_biases if biases is not None)
        assert 0 < slots == engine.plan.slot_bytes
        assert engine.plan.total_bytes <= 2_000_000


def test_unknown_mode_and_policy_are_refused() -> None:
    for mode, policy, said in (("fast", "static", "dense, exact"), ("exact", "best", "guide")):
        with pytest.raises(ValueError, match=f"unknown.*{said}"), tiny_engine(mode=mode, policy=policy):
            pass


@pytest.mark.parametrize("context", [0, -1, 1, 257])
def test_a_context_that_the_model_does_not_take_is_refused(
    context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "tensor", lambda *args: pytest.fail("a weight was read"))
    with pytest.raises(ValueError, match="--ctx-size.*2 to 256"), tiny_engine(context_length=context):
        pass


def test_the_least_context_has_room_for_one_token_of_prompt_and_answer() -> None:
    with tiny_engine(context_length=2) as engine:
        assert len(engine.generate([40], GREEDY).token_ids) == 1


def test_placement_settings_without_effect_fail_in_dense_mode() -> None:
    with pytest.raises(ValueError, match="--gpu-cache-neurons has no effect with --mode dense"):
        Engine(TINY, mode="dense", placement=PlacementConfig(gpu_cache_neurons=5))


def test_a_closed_engine_tells_so_and_one_without_slots_has_its_neurons_on_the_host() -> None:
    with tiny_engine(context_length=CONTEXT) as engine:
        assert engine.placement()["neurons"] == "host" and "none in a device slot" in engine.describe()
    for ask in (
        engine.describe,
        engine.placement,
        lambda: engine.begin([1], GREEDY),
        lambda: engine.generate([1], GREEDY),
    ):
        with pytest.raises(ValueError, match="this engine is closed"):
            ask()
