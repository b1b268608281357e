"""The default model: greedy tokens and first logits that another implementation gave."""

import json
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kairox_jax import load_model
from kairox_jax.models import Block, Decoder

ROOT = Path(__file__).parents[2]
CASES = json.loads((ROOT / "tests/data/smollm2_greedy.json").read_text())
BLOCK = nnx.jit(Block.__call__)
CALL = nnx.jit(Decoder.__call__)  # the weights are arguments: as constants they cost 110 s of compiling
PADDED = 32  # one shape for all calls; what follows a position does not change it


@pytest.fixture(scope="module")
def model(default_model: Path) -> Decoder:
    return load_model(default_model)


def next_logits(run: object, ids: list[int]) -> np.ndarray:
    row = np.zeros((1, PADDED), np.int32)
    row[0, : len(ids)] = ids
    return np.asarray(run(row))[0, len(ids) - 1]  # type: ignore[operator]


def layered_logits(model: Decoder, ids: np.ndarray) -> np.ndarray:
    """Logits after the last token; one compiled block serves all layers."""
    start = jnp.zeros(1, jnp.int32)
    x = model.embed_tokens(jnp.asarray(ids), start)
    for block in model.blocks:
        x, _ = BLOCK(block, x, start)
    return np.asarray(model.logits(x[0, -1]))


@pytest.mark.model
def test_first_logits_and_greedy_tokens(model: Decoder) -> None:
    run = partial(CALL, model)
    for case in CASES:
        logits = next_logits(run, case["prompt_ids"])
        ids, values = zip(*case["first_top5"], strict=True)
        assert tuple(np.argsort(-logits)[: len(ids)]) == ids
        np.testing.assert_allclose(logits[list(ids)], values, atol=2e-3)
    ids = list(CASES[0]["prompt_ids"])
    for want in CASES[0]["greedy_ids"]:
        ids.append(int(next_logits(run, ids).argmax()))
        assert ids[-1] == want


@pytest.mark.model
def test_exact_takes_the_shipped_thresholds(model: Decoder, default_model: Path) -> None:
    exact = load_model(default_model, "exact")
    shipped = json.loads((ROOT / "checkpoints/smollm2-135m/thresholds.json").read_text())["thresholds"]
    in_use = [float(block.ffn.threshold.get_value()) for block in exact.blocks]
    np.testing.assert_allclose(in_use, shipped, rtol=1e-6)
    ids = np.array([CASES[0]["prompt_ids"]], np.int32)
    got, dense = layered_logits(exact, ids), layered_logits(model, ids)
    assert int(got.argmax()) == CASES[0]["greedy_ids"][0]
    assert np.abs(got - dense).max() > 0.01
