"""Ranks within a budget and thresholds for shares and recalls, against plain counting."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.predictor_choose import choose_ranks, common_shares, cut_for_recall, cuts_for_shares


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, 20), st.integers(1, 1000))
def test_ranks_spend_the_budget_and_no_more(scales: list[float], extra: int, unit: int) -> None:
    layers = len(scales)
    gains = [np.sort(np.random.default_rng(i).uniform(size=128))[::-1] for i in range(layers)]
    ranks = choose_ranks(gains, np.array(scales), unit, (layers + extra) * unit)
    assert all(rank % 32 == 0 and 32 <= rank <= 128 for rank in ranks)
    assert sum(ranks) // 32 == min(layers + extra, 4 * layers)


def test_ranks_go_where_they_explain_most() -> None:
    gains = [np.full(128, 1.0), np.full(128, 1.0), np.r_[np.full(64, 5.0), np.full(64, 0.1)]]
    assert choose_ranks(gains, np.array([1.0, 3.0, 1.0]), 10, 60) == [32, 96, 64]
    with pytest.raises(ValueError, match="a budget of 20 bytes is under the 30"):
        choose_ranks(gains, np.ones(3), 10, 20)


def test_cuts_predict_the_share_they_were_made_for(rng: np.random.Generator) -> None:
    scores = [np.sort(rng.normal(size=1000) * (i + 1)) for i in range(3)]
    shares = np.array([0.2, 0.55, 0.9])
    cuts = cuts_for_shares(scores, shares)
    got = [(s >= c).mean() for s, c in zip(scores, cuts, strict=True)]
    np.testing.assert_allclose(got, shares, atol=0.002)


def test_one_price_for_all_layers(rng: np.random.Generator) -> None:
    scores = [np.sort(rng.normal(size=2000)) for _ in range(3)]
    offsets = np.array([-1.0, 0.0, 2.0])
    shares = common_shares(scores, offsets, 0.4)
    assert shares.mean() == pytest.approx(0.4, abs=0.01)
    together = np.sort(np.concatenate([s + o for s, o in zip(scores, offsets, strict=True)]))
    price = together[int(0.6 * len(together))]
    want = [(s + o >= price).mean() for s, o in zip(scores, offsets, strict=True)]
    np.testing.assert_allclose(shares, want, atol=0.01)


@given(st.integers(0, 50), st.floats(0.05, 0.99))
def test_a_recall_is_reached_with_the_fewest(seed: int, recall: float) -> None:
    rng = np.random.default_rng(seed)
    score, part = rng.permutation(60).reshape(6, 10).astype(float), rng.exponential(size=(6, 10))
    cut = cut_for_recall(score, part, recall)
    assert part[score >= cut].sum() >= recall * part.sum() * (1 - 1e-9)
    assert part[score > cut].sum() < recall * part.sum()


def test_nothing_to_recall() -> None:
    with pytest.raises(ValueError, match="no neuron contributes"):
        cut_for_recall(np.zeros((2, 3)), np.zeros((2, 3)), 0.5)
