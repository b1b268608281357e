"""Every family's module computes what another implementation computed, at once and token by token."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kairox_jax import load_model
from kairox_jax.models import Decoder, empty_cache

MODELS = Path(__file__).parents[1] / "data/models"
FAMILIES = sorted(path.parent.name for path in MODELS.glob("*/expected.npz"))
SILU = {"llama3-rope", "llama-old-keys"}
TOLERANCE = 2e-4  # of the largest |logit|
CALL, EXTEND = nnx.jit(Decoder.__call__), nnx.jit(Decoder.extend)


def expected(name: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(MODELS / name / "expected.npz") as file:
        return file["input_ids"], file["logits"]


def worst(got: object, want: np.ndarray) -> float:
    """The largest difference as a share of the largest |logit|; NaN passes no comparison."""
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())


def cached_logits(model: Decoder, ids: np.ndarray, *, first: int, length: int) -> np.ndarray:
    """Logits of ``first`` tokens and then of single tokens, over caches of ``length`` positions."""
    batch, steps = ids.shape
    caches = [empty_cache(model.config, batch=batch, length=length)] * model.config.num_layers
    logits, caches = EXTEND(model, jnp.asarray(ids[:, :first]), jnp.zeros(batch, jnp.int32), caches)
    parts = [np.asarray(logits)]
    for t in range(first, steps):
        start = jnp.full(batch, t, jnp.int32)
        logits, caches = EXTEND(model, jnp.asarray(ids[:, t : t + 1]), start, caches)
        parts.append(np.asarray(logits))
    return np.concatenate(parts, axis=1)


def test_all_families_are_there() -> None:
    assert len(FAMILIES) == 17 and set(FAMILIES) > SILU


@pytest.mark.parametrize("name", FAMILIES)
def test_dense(name: str) -> None:
    ids, want = expected(name)
    got = CALL(load_model(MODELS / name), ids)
    assert got.dtype == jnp.float32 and got.shape == want.shape
    assert worst(got, want) <= TOLERANCE


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - SILU))
def test_exact_is_dense_where_inactive_neurons_are_zero(name: str) -> None:
    ids, want = expected(name)
    assert worst(CALL(load_model(MODELS / name, "exact"), ids), want) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_changes_nothing(name: str) -> None:
    ids, want = expected(name)
    model = load_model(MODELS / name)
    steps = ids.shape[1]
    got = cached_logits(model, ids, first=steps - 4, length=steps + 5)
    assert worst(got, want) <= TOLERANCE


@pytest.mark.parametrize("name", ["opt", "mistral-window", "relu-falcon", "sparse-qwen2"])
def test_sequences_of_different_lengths_share_a_step(name: str) -> None:
    ids, want = expected(name)
    model = load_model(MODELS / name)
    text, other = ids[0], ids[-1][::-1]
    full = np.asarray(CALL(model, np.stack([text, other])))
    assert worst(full[0], want[0]) <= TOLERANCE
    # The first sequence is 3 tokens behind: what the padded chunk wrote beyond its start is overwritten.
    starts, length = np.array([len(text) - 6, len(text) - 3]), len(text) + 2
    caches = [empty_cache(model.config, batch=2, length=length)] * model.config.num_layers
    chunk = np.stack([text, other])[:, : starts[1]].copy()
    chunk[0, starts[0] :] = 1
    _, caches = EXTEND(model, jnp.asarray(chunk), jnp.zeros(2, jnp.int32), caches)
    for step in range(3):
        at = starts + step
        token = np.array([[text[at[0]]], [other[at[1]]]])
        logits, caches = EXTEND(model, jnp.asarray(token), jnp.asarray(at, jnp.int32), caches)
        assert worst(logits[0, 0], full[0, at[0]]) <= TOLERANCE
        assert worst(logits[1, 0], full[1, at[1]]) <= TOLERANCE


def test_the_bound_notices_a_wrong_model() -> None:
    ids, want = expected("mistral-window")
    assert worst(CALL(load_model(MODELS / "mistral-window"), ids[:, ::-1]), want) > 100 * TOLERANCE
