"""The reservoir is a fair sample, and partners are those of the whole matrix."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training import coactivation
from training.coactivation import Reservoir, layer_sets, top_partners


@given(
    tokens=st.integers(2, 40),
    neurons=st.integers(2, 30),
    share=st.floats(0.05, 0.95),
    beyond=st.booleans(),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_partners_are_those_of_the_whole_matrix(
    tokens: int, neurons: int, share: float, beyond: bool, data: st.DataObject
) -> None:
    active = np.random.default_rng(tokens * 100 + neurons).random((tokens, neurons)) < share
    count = data.draw(st.integers(1, neurons - 1))
    partners, shares = top_partners(active, count, beyond_chance=beyond)
    values = active.astype(np.float64)
    matrix = values.T @ values / tokens
    if beyond:
        matrix -= np.outer(values.mean(0), values.mean(0))
    np.fill_diagonal(matrix, -np.inf)
    want = -np.sort(-matrix, axis=1)[:, :count]
    np.testing.assert_allclose(shares, want, atol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(matrix, partners, axis=1), want, atol=1e-6)
    assert (partners != np.arange(neurons)[:, None]).all()
    assert all(len(set(row)) == count for row in partners)


def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    active = rng.random((50, 33)) < 0.4
    whole = top_partners(active, 5)
    monkeypatch.setattr(coactivation, "BLOCK_BYTES", 4 * 33 * 7)  # seven rows at a time
    for got, want in zip(top_partners(active, 5), whole, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_sample_errs_by_what_is_said(rng: np.random.Generator) -> None:
    """Shares of partners from 400 of 20000 tokens lie within the stated standard error."""
    draws = rng.random((20000, 6))
    active = np.stack([draws[:, 0] < 0.3, draws[:, 0] < 0.4, draws[:, 1] < 0.5, draws[:, 2] < 0.2], axis=1)
    exact = (active[:, 0] & active[:, 1]).mean()
    errors = []
    for seed in range(60):
        reservoir = Reservoir(400, seed)
        for part in np.array_split(np.packbits(active[:, None, :], axis=-1), 31):
            reservoir.add(part)
        sets = layer_sets(reservoir.rows(), 0, 4)
        partners, shares = top_partners(sets, 1)
        assert partners[0, 0] == 1
        errors.append(shares[0, 0] - exact)
    want = np.sqrt(exact * (1 - exact) / 400)
    assert 0.7 * want < np.std(errors) < 1.3 * want
    assert abs(np.mean(errors)) < 3 * want / np.sqrt(60)


def test_every_token_is_as_likely_to_be_held() -> None:
    held = np.zeros(50)
    for seed in range(400):
        reservoir = Reservoir(10, seed)
        for start in range(0, 50, 7):
            reservoir.add(np.arange(start, min(start + 7, 50), dtype=np.uint8)[:, None, None])
        rows = reservoir.rows().ravel()
        assert len(set(rows)) == 10
        held[rows] += 1
    # 400 draws of 10 in 50: 80 each, standard deviation 8
    assert abs(held - 80).max() < 4 * 8


def test_a_short_text_is_held_whole() -> None:
    reservoir = Reservoir(10)
    reservoir.add(np.arange(6, dtype=np.uint8).reshape(3, 1, 2))
    np.testing.assert_array_equal(reservoir.rows().ravel(), np.arange(6))


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="0 tokens: hold 1 or more"):
        Reservoir(0)
    with pytest.raises(ValueError, match="no token was seen"):
        Reservoir(3).rows()
    with pytest.raises(ValueError, match="4 partners of 4 neurons"):
        top_partners(np.ones((3, 4), bool), 4)
    with pytest.raises(ValueError, match="no token was sampled"):
        top_partners(np.ones((0, 4), bool), 2)
