"""From settings to something that decodes; what would have no effect is refused."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_model import MODELS, NUM_LAYERS, NUM_NEURONS, TINY

from kairox_jax.balancing import Guide, Static
from kairox_jax.config import PlacementConfig
from kairox_jax.engine import Engine, plan_only
from kairox_jax.engine.loading import (
    DEFAULT_CONTEXT,
    build_policy,
    device_free_bytes,
    make_plan,
    resolve_context,
)
from kairox_jax.engine.needs import dense_weight_count, host_dense_bytes
from kairox_jax.io import Checkpoint, Sparsity, open_checkpoint, save_sparsity
from kairox_jax.io.sparsity import fingerprint
from kairox_jax.models import find_sparsity, resolve_thresholds
from kairox_jax.placement import record_layouts

SILU = MODELS / "llama3-rope"
CPU: Any = SimpleNamespace(platform="cpu", device_kind="cpu")


def card(free: int) -> Any:
    stats = {"bytes_limit": free + 1000, "bytes_in_use": 1000}
    return SimpleNamespace(platform="gpu", device_kind="card", memory_stats=lambda: stats)


@pytest.fixture(scope="module")
def tiny() -> Checkpoint:
    return open_checkpoint(TINY)


def plan(tiny: Checkpoint, device: Any = CPU, mode: str = "exact", **settings: Any) -> Any:
    return make_plan(
        tiny.config,
        record_layouts(tiny),
        mode=mode,
        placement=PlacementConfig(**settings),
        context_length=64,
        device=device,
        host_dense_bytes=host_dense_bytes(tiny) if device is CPU else None,
    )


def test_context_is_the_models_but_at_most_the_default(tiny: Checkpoint) -> None:
    assert resolve_context(tiny.config, None) == 256
    assert resolve_context(replace(tiny.config, context_length=10**6), None) == DEFAULT_CONTEXT
    assert resolve_context(replace(tiny.config, context_length=10**6), 10**6) == 10**6
    assert [resolve_context(tiny.config, n) for n in (2, 256)] == [2, 256]


@pytest.mark.parametrize("context", [0, -1, 1, 257])
def test_context_out_of_range_is_refused(tiny: Checkpoint, context: int) -> None:
    with pytest.raises(ValueError, match=f"--ctx-size {context}: this model takes 2 to 256"):
        resolve_context(tiny.config, context)


def test_replay_3_a_silu_model_without_thresholds_says_what_can_be_done() -> None:
    with pytest.raises(ValueError, match="SiLU.*--mode dense.*thresholds"):
        resolve_thresholds(open_checkpoint(SILU).config, None)


def test_thresholds_of_each_activation(tiny: Checkpoint) -> None:
    assert resolve_thresholds(tiny.config, None).tolist() == [0.0] * NUM_LAYERS
    fat = replace(tiny.config, activation="fatrelu", activation_threshold=0.25)
    assert resolve_thresholds(fat, None).tolist() == [0.25] * NUM_LAYERS
    silu = replace(tiny.config, activation="silu")
    given = Sparsity(np.array([0.1, 0.2], np.float32), None)
    np.testing.assert_array_equal(resolve_thresholds(silu, given), given.thresholds)
    with pytest.raises(ValueError, match="1 thresholds for 2 layers"):
        resolve_thresholds(silu, Sparsity(np.array([0.1], np.float32), None))


def test_no_sparsity_is_shipped_for_an_unknown_model(tiny: Checkpoint) -> None:
    assert find_sparsity(tiny, None) is None


def save(folder: Path, checkpoint: Checkpoint, **facts: Any) -> Path:
    meta = {"fingerprint": fingerprint(checkpoint), "num_neurons": NUM_NEURONS, **facts}
    save_sparsity(folder, Sparsity(np.full(NUM_LAYERS, 0.1, np.float32), None, meta))
    return folder


def test_a_sparsity_folder_is_read(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(SILU)
    found = find_sparsity(checkpoint, save(tmp_path, checkpoint))
    assert found is not None and found.thresholds.tolist() == [np.float32(0.1)] * NUM_LAYERS


def test_a_sparsity_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(SILU)
    folder = save(tmp_path, checkpoint, fingerprint="0" * 64, model="another one")
    with pytest.raises(ValueError, match="not for this model"):
        find_sparsity(checkpoint, folder)


def test_guide_takes_the_settings() -> None:
    settings = PlacementConfig(tam_beta=0.5, tam_threshold=0.6, tam_evict=0.2, anb_enable=False)
    guide = build_policy(settings, has_prior=True)
    assert isinstance(guide, Guide)
    assert (guide.beta, guide.promote_threshold, guide.evict_threshold) == (0.5, 0.6, 0.2)
    assert not guide.anb and guide.warm_start
    cold = build_policy(PlacementConfig(policy="guide"), has_prior=False)
    assert isinstance(cold, Guide) and not cold.warm_start and cold.anb


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("tam_beta", 0.5, "--tam-beta"),
        ("tam_threshold", 0.5, "--tam-threshold"),
        ("tam_evict", 0.1, "--tam-evict"),
        ("anb_enable", False, "--no-anb"),
    ],
)
def test_replay_13_momentum_settings_without_effect_are_refused(field: str, value: Any, flag: str) -> None:
    for name in ("static", "split"):
        with pytest.raises(ValueError, match=f"{flag} has no effect with --policy {name}"):
            build_policy(PlacementConfig(policy=name, **{field: value}), has_prior=True)
    assert isinstance(build_policy(PlacementConfig(policy="static"), has_prior=True), Static)


def test_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'best' is unknown.*guide.*static"):
        build_policy(PlacementConfig(policy="best"), has_prior=True)


def test_unknown_mode_is_refused_with_the_known_ones(tiny: Checkpoint) -> None:
    with pytest.raises(ValueError, match="'sparse' is unknown: choose one of dense, exact"):
        plan(tiny, mode="sparse")


def test_replay_10_budgets_on_a_card(tiny: Checkpoint) -> None:
    needs = plan(tiny, card(10**10)).needs
    fixed, per_slot = needs.fixed_bytes, NUM_LAYERS * needs.slot_bytes
    assert plan(tiny, card(fixed + 9 * per_slot)).slots_per_layer == 9
    assert plan(tiny, card(10**10), vram_budget_bytes=fixed + 3 * per_slot).slots_per_layer == 3
    with pytest.raises(ValueError, match="exceeds the device's free memory"):
        plan(tiny, card(fixed), vram_budget_bytes=fixed + 1)
    with pytest.raises(ValueError, match="too small for the dense part") as error:
        plan(tiny, vram_budget_bytes=1000)
    assert "dense weights" in str(error.value) and "raise --vram-budget" in str(error.value)


def test_free_memory_of_devices() -> None:
    assert device_free_bytes(CPU) is None and device_free_bytes(card(77)) == 77
    silent: Any = SimpleNamespace(platform="gpu", device_kind="card", memory_stats=lambda: None)
    with pytest.raises(ValueError, match="name --vram-budget"):
        device_free_bytes(silent)


def test_a_budget_makes_up_for_a_device_that_does_not_tell_its_memory(tiny: Checkpoint) -> None:
    """The refusal above names this remedy."""
    silent: Any = SimpleNamespace(platform="gpu", device_kind="card", memory_stats=lambda: None)
    assert plan(tiny, silent, vram_budget_bytes=10**10).slots_per_layer == NUM_NEURONS


def test_dense_keeps_every_neuron_on_an_accelerator_and_says_so(tiny: Checkpoint) -> None:
    made = plan(tiny, card(10**10), mode="dense")
    assert made.slots_per_layer == NUM_NEURONS and "dense keeps all" in made.table()
    assert made.needs == plan(tiny, card(10**10)).needs


def test_dense_without_an_accelerator_has_no_slots(tiny: Checkpoint) -> None:
    """Host kernels compute every neuron: the plan says so, and counts what they keep and nothing for slots."""
    for settings in ({}, {"vram_budget_bytes": 10**9}):
        made = plan(tiny, mode="dense", **settings)
        assert made.slots_per_layer == made.to_json()["slots"] == 0
        assert made.total_bytes == plan(tiny).total_bytes, "exact mode keeps the same beside its slots"
        assert f"0 of {NUM_NEURONS} neurons a layer have a slot (0 %)" in made.table()
        assert "dense computes all of them by host kernels" in made.table()


@pytest.mark.parametrize("device", [CPU, card(10**10)], ids=["cpu", "card"])
def test_dense_below_its_need_names_only_remedies_that_dense_takes(tiny: Checkpoint, device: Any) -> None:
    need = plan(tiny, device, mode="dense").total_bytes
    assert plan(tiny, device, mode="dense", vram_budget_bytes=need).total_bytes == need
    with pytest.raises(ValueError, match="--vram-budget") as error:
        plan(tiny, device, mode="dense", vram_budget_bytes=need - 1)
    first = str(error.value).split("\n")[0]
    assert "--gpu-cache-neurons" not in first, "dense refuses this option"
    assert ("whole model" in first) == ("--mode exact" in first) == (device is not CPU)


def test_replay_13_more_slots_than_neurons_fail(tiny: Checkpoint) -> None:
    with pytest.raises(ValueError, match=f"--gpu-cache-neurons {NUM_NEURONS + 1}.*{NUM_NEURONS} neurons"):
        plan(tiny, gpu_cache_neurons=NUM_NEURONS + 1)


def test_a_neurons_bias_takes_room_in_its_slot_and_in_the_prefill() -> None:
    """In the prefill only where layers are streamed to a device."""
    opt = open_checkpoint(MODELS / "opt")
    without = replace(opt, config=replace(opt.config, ffn_bias=False))
    for device, floats in ((card(10**10), opt.config.num_layers * opt.config.num_neurons), (CPU, 0)):
        settings = {"device": device, "slot_format": "float32"}
        more, less = plan(opt, **settings).needs, plan(without, **settings).needs
        assert more.slot_bytes == 2 * 64 * 4 + 4 == less.slot_bytes + 4
        assert more.workspace_bytes - less.workspace_bytes == floats * 4


def test_only_host_kernels_keep_the_files_rows_and_stream_no_layer(tiny: Checkpoint) -> None:
    """In a jitted program the CPU device holds the dense part in float32, as an accelerator does."""
    half = open_checkpoint(MODELS / "falcon-one-kv")
    settings = {"placement": PlacementConfig(host_callback="pure"), "context_length": 64}
    in_jit, by_host = plan_only(half.path, **settings), plan_only(half.path, context_length=64)
    assert in_jit.needs.dense_bytes == 4 * dense_weight_count(half.config)
    assert by_host.needs.dense_bytes == host_dense_bytes(half) < in_jit.needs.dense_bytes
    assert by_host.needs.workspace_bytes < in_jit.needs.workspace_bytes


def test_plan_only_reads_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "tensor", lambda *args: pytest.fail("a weight was read"))
    made = plan_only(TINY, placement=PlacementConfig(gpu_cache_neurons=7), context_length=64)
    assert made.slots_per_layer == 7


@pytest.mark.parametrize(
    ("placement", "settings", "message"),
    [
        ({"policy": "nope"}, {}, "'nope'"),
        ({"policy": "split", "tam_beta": 0.8}, {}, "no effect with --policy split"),
        ({"policy": "lru"}, {"mode": "dense"}, "no effect with --mode dense: --policy"),
        ({}, {"predictors": "somewhere"}, "--predictors has no effect"),
        ({}, {"sparsity": "nowhere"}, "nowhere"),
        ({}, {"parallel": 9}, "--parallel 9"),
    ],
)
def test_a_plan_is_refused_where_the_engine_would_be(
    placement: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    for opened in (plan_only, Engine):
        with pytest.raises(ValueError, match=message):
            opened(TINY, placement=PlacementConfig(**placement), context_length=64, **settings)


def test_flags_that_need_slots_are_told_of_their_absence(caplog: pytest.LogCaptureFixture) -> None:
    plan_only(TINY, placement=PlacementConfig(policy="lru", emulated_link="1GB/s,5us"), context_length=64)
    assert "--policy, --emulated-link: nothing has a slot" in caplog.text
    caplog.clear()
    plan_only(TINY, context_length=64)
    plan_only(TINY, placement=PlacementConfig(policy="lru", gpu_cache_neurons=3), context_length=64)
    assert "slot" not in caplog.text
