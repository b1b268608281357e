"""Attention of a group of heads against NumPy float64."""

import numpy as np
import pytest

from kairox_jax.host.heads import attend


def mixed(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Run the kernel: queries [G, H], keys and values [S, H]."""
    out = np.full(queries.size, np.nan, np.float32)
    attend(queries.reshape(-1), keys, values, np.empty((len(queries), len(keys) + 3), np.float32), out)
    return out.reshape(queries.shape)


def expected(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Compute the same in float64."""
    scores = queries.astype(np.float64) @ keys.T.astype(np.float64) / np.sqrt(queries.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ values.astype(np.float64)


@pytest.mark.parametrize("size", [2, 10, 16, 64, 80, 128, 144])
@pytest.mark.parametrize("length", [1, 7, 8, 31, 32, 33, 70])
@pytest.mark.parametrize("heads", [1, 3])
def test_against_float64(rng, size, length, heads):
    queries, keys, values = (
        rng.normal(size=(rows, size)).astype(np.float32) for rows in (heads, length, length)
    )
    np.testing.assert_allclose(mixed(queries, keys, values), expected(queries, keys, values), atol=2e-6)


def test_a_group_has_the_bits_of_its_heads_alone(rng):
    queries, keys, values = (rng.normal(size=(rows, 64)).astype(np.float32) for rows in (4, 90, 90))
    alone = np.concatenate([mixed(queries[g : g + 1], keys, values) for g in range(4)])
    assert np.array_equal(mixed(queries, keys, values), alone)


@pytest.mark.parametrize("factor", [1e-6, 30.0, 1e4])
def test_flat_and_sharp_scores(rng, factor):
    keys, values = (rng.normal(size=(50, 32)).astype(np.float32) for _ in range(2))
    queries = (factor * rng.normal(size=(2, 32))).astype(np.float32)
    want = expected(queries, keys, values)
    np.testing.assert_allclose(mixed(queries, keys, values), want, atol=1e-6 * max(1.0, factor))


@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_nan_is_seen(rng, place):
    queries, keys, values = (rng.normal(size=(rows, 32)).astype(np.float32) for rows in (1, 40, 40))
    {"query": queries, "key": keys, "value": values}[place][0, 3] = np.nan
    assert np.isnan(mixed(queries, keys, values)).any()
