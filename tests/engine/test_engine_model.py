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
from kairox_jax.engine import Engine, opening
from kairox_jax.engine.whole import Whole
from kairox_jax.io import open_checkpoint, shipped_sparsity
from kairox_jax.models import load_decoder

pytestmark = pytest.mark.model
CASES = json.loads((Path(__file__).parents[1] / "data/smollm2_greedy.json").read_text())
NUM_LAYERS, NUM_NEURONS = 30, 1536
CONTEXT = 256
GREEDY = GenerationConfig(max_tokens=12, temperature=0, ignore_eos=True)
TOLERANCE = 1e-4  # relative; measured: 2e-5


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
    with opened(default_model, "auto", mode="dense") as engine:
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


# Half of the neurons in slots, and moving, follows below.
@pytest.mark.slow
@pytest.mark.parametrize("slots", [0, NUM_NEURONS // 4, NUM_NEURONS])
def test_replay_12_exact_gives_the_same_tokens_at_any_residency(
    default_model: Path, slots: int, flax_ids: list[list[int]]
) -> None:
    with opened(default_model, gpu_cache_neurons=slots) as engine:
        assert hybrid_of(engine).num_resident == slots * NUM_LAYERS
        assert continuations(engine) == flax_ids


@pytest.mark.slow
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


# With a step at the thresholds, the first token of this text moved the logits by 0.9 where a neuron (layer 18, 1258)
# lay within 1e-6 of its threshold.
NEAR_THRESHOLD = "The cat sat on a mat, and the cat was watching a movie. The movie was about a dog"


@pytest.fixture(scope="module")
def flax_logits(default_model: Path) -> tuple[list[int], np.ndarray]:
    """Token ids, and the logits after each by the thresholded Flax modules, [T, V]."""
    checkpoint = open_checkpoint(default_model)
    sparsity = shipped_sparsity(checkpoint)
    assert sparsity is not None
    ids = checkpoint.tokenizer().encode(NEAR_THRESHOLD, add_bos=False)
    return ids, np.asarray(load_decoder(checkpoint, sparsity.thresholds.tolist())(jnp.array([ids]))[0])


@pytest.mark.slow
@pytest.mark.parametrize("dense_part", DENSE_PARTS)
@pytest.mark.parametrize("slots", [0, NUM_NEURONS // 4, NUM_NEURONS])
def test_exact_logits_are_those_of_the_thresholded_function(
    default_model: Path,
    dense_part: str,
    slots: int,
    flax_logits: tuple[list[int], np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, want = flax_logits
    monkeypatch.setattr(opening, "HostDense", DENSE_PARTS[dense_part])
    with opened(default_model, gpu_cache_neurons=slots) as engine:
        assert hybrid_of(engine).dense.name in ("device", "host kernels")
        got = all_logits(engine, ids, prompt=1)
        counts = run_step(engine, 30, len(ids))[1]
    for step, (one, other) in enumerate(zip(got, want, strict=True)):
        assert relative_error(one, other) < TOLERANCE, f"step {step}"
    assert (counts.hits + counts.residual == counts.active.sum(axis=1)).all()
    assert 0.2 < counts.active.mean() < 0.7
