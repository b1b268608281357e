"""The default model through the engine: the reference's tokens, at any residency and while neurons move."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import DENSE_PARTS, Churn, all_logits, hybrid_of, relative_error, run_step

from kairox_jax.balancing import POLICIES
from kairox_jax.config import GenerationConfig, PlacementConfig
from kairox_jax.engine import Engine
from kairox_jax.engine import engine as engine_module
from kairox_jax.engine.whole import Whole
from kairox_jax.io import Sparsity, open_checkpoint, save_sparsity, shipped_sparsity
from kairox_jax.models import load_decoder

pytestmark = pytest.mark.model
CASES = json.loads((Path(__file__).parents[1] / "data/smollm2_greedy.json").read_text())
NUM_LAYERS, NUM_NEURONS = 30, 1536
CONTEXT = 256
GREEDY = GenerationConfig(max_tokens=12, temperature=0, ignore_eos=True)
TOLERANCE = 2e-5  # relative; measured: 7e-6
SHORT_TEXT = CASES[0]["prompt_ids"] + CASES[0]["greedy_ids"][:8]


@contextmanager
def opened(model: Path, policy: type | str = "static", **settings: Any) -> Iterator[Engine]:
    own = {"mode": settings.pop("mode", "exact"), "sparsity": settings.pop("sparsity", None)}
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(policy, type):
            patch.setitem(POLICIES, "under-test", policy)
        name = "under-test" if isinstance(policy, type) else policy
        placement = PlacementConfig(policy=name, **settings)
        with Engine(model, placement=placement, context_length=CONTEXT, **own) as engine:
            yield engine


@pytest.fixture(scope="module")
def flax_ids(default_model: Path) -> list[list[int]]:
    """Greedy continuations by the thresholded Flax decoder: every neuron, no slots, no host kernels."""
    checkpoint = open_checkpoint(default_model)
    sparsity = shipped_sparsity(checkpoint)
    assert sparsity is not None
    decoder = Whole(load_decoder(checkpoint, sparsity.thresholds.tolist()), batch=1, context_length=CONTEXT)
    continuations = []
    for case in CASES:
        ids = [int(decoder.prefill_logits(np.asarray(case["prompt_ids"], np.int32), 0, 0).argmax())]
        while len(ids) < GREEDY.max_tokens:
            at = len(case["prompt_ids"]) + len(ids) - 1
            logits, _ = decoder.step(*(np.array([n], np.int32) for n in (ids[-1], at, 0)))
            ids.append(int(logits.argmax()))
        continuations.append(ids)
    return continuations


def continuations(engine: Engine) -> list[list[int]]:
    return [engine.generate(case["prompt_ids"], GREEDY).token_ids for case in CASES]


def test_dense_gives_the_references_tokens_and_text(default_model: Path) -> None:
    with opened(default_model, "guide", mode="dense") as engine:
        for case in CASES:
            settings = GenerationConfig(max_tokens=len(case["greedy_ids"]), temperature=0)
            result = engine.generate(case["prompt"], settings)
            assert result.prompt_token_ids == case["prompt_ids"]
            assert result.token_ids == case["greedy_ids"] and result.text == case["text"]
        stop = " 2018-01"  # over several tokens of the first text
        result = engine.generate(CASES[0]["prompt"], GenerationConfig(temperature=0, stop=(stop,)))
        assert result.text == CASES[0]["text"].split(stop)[0] and result.finish_reason == "stop"
        logits = engine.batch.runner.prefill_logits(np.array(CASES[0]["prompt_ids"], np.int32), 0, 0)
        for token, value in CASES[0]["first_top5"]:
            assert logits[token] == pytest.approx(value, abs=2e-3)


@pytest.mark.parametrize("slots", [0, NUM_NEURONS // 4, NUM_NEURONS // 2, NUM_NEURONS])
def test_replay_12_exact_gives_the_same_tokens_at_any_residency(
    default_model: Path, slots: int, flax_ids: list[list[int]]
) -> None:
    with opened(default_model, gpu_cache_neurons=slots) as engine:
        assert hybrid_of(engine).num_resident == slots * NUM_LAYERS
        assert continuations(engine) == flax_ids


@pytest.mark.parametrize("slot_format", ["float32", "packed"])
def test_replay_12_exact_gives_the_same_tokens_while_neurons_move(
    default_model: Path, flax_ids: list[list[int]], slot_format: str
) -> None:
    settings = {"gpu_cache_neurons": NUM_NEURONS // 2, "slot_format": slot_format}
    with opened(default_model, Churn, **settings) as engine:
        assert f"{slot_format} device slots" in engine.describe()
        results = [engine.generate(case["prompt_ids"], GREEDY) for case in CASES]
    assert [result.token_ids for result in results] == flax_ids
    for stats in (result.stats for result in results):
        assert min(stats.promotions, stats.evictions) > 80 * NUM_LAYERS, "the policy did not churn"
        assert stats.hits > 0 and stats.residual > 0


@pytest.fixture(scope="module")
def clear_cut(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """Thresholds without a value near them, and the Flax modules' logits [T, V] of ``SHORT_TEXT`` with them.

    The function jumps at a threshold: with the shipped ones, one value of |z| 6e-7 above its threshold moved
    the logits by 2 %. So each threshold goes to the middle of the widest gap within 2 % of the shipped one.
    """
    checkpoint = open_checkpoint(default_model)
    shipped = shipped_sparsity(checkpoint)
    assert shipped is not None
    decoder, limits = load_decoder(checkpoint), []
    x, start = decoder.embed[...][jnp.array([SHORT_TEXT])], jnp.zeros(1, jnp.int32)
    for layer, block in enumerate(decoder.blocks):
        x = x + block.attention(x, start)[0]
        z = np.asarray(block.ffn.values(block.ffn.normalise(x))[0])
        sizes, nominal = np.sort(np.abs(z).ravel()), shipped.thresholds[layer]
        near = sizes[np.abs(sizes / nominal - 1) < 0.02]
        widest = int(np.argmax(np.diff(near)))
        limits.append(np.float32(near[widest : widest + 2].mean()))
        assert np.abs(sizes / limits[-1] - 1).min() > 2e-5
        x = x + jnp.where(np.abs(z) > limits[-1], z, 0) @ block.ffn.w_down[...]
    folder = tmp_path_factory.mktemp("clear-cut")
    save_sparsity(folder, Sparsity(np.array(limits), shipped.frequency, shipped.meta))
    return folder, np.asarray(decoder.logits(x))[0]


@pytest.mark.parametrize("dense_part", DENSE_PARTS)
def test_exact_logits_are_those_of_the_thresholded_function(
    default_model: Path, dense_part: str, clear_cut: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, (folder, flax_logits) = len(CASES[0]["prompt_ids"]), clear_cut
    monkeypatch.setattr(engine_module, "HostDense", DENSE_PARTS[dense_part])
    with opened(default_model, sparsity=folder, gpu_cache_neurons=NUM_NEURONS // 2) as engine:
        assert hybrid_of(engine).dense.name in ("device", "host kernels")
        got = all_logits(engine, SHORT_TEXT, prompt=prompt)
        counts = run_step(engine, 30, len(SHORT_TEXT))[1]
    for step, (one, want) in enumerate(zip(got, flax_logits[prompt - 1 :], strict=True)):
        assert relative_error(one, want) < TOLERANCE, f"step {step}"
    assert (counts.hits + counts.residual == counts.active.sum(axis=1)).all()
    assert 0.2 < counts.active.mean() < 0.7
