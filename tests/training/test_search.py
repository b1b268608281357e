"""The search over shares, against brute force and closed forms."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.search import GRID, MOST_SHARE, allocate, balance_kinds, convex_curve, largest_share

POINTS = np.arange(0.05, 0.96, 0.05)


@given(st.lists(st.floats(0, 10), min_size=len(POINTS), max_size=len(POINTS)))
@settings(max_examples=50, deadline=None)
def test_curve_is_convex_rising_and_below_the_points(cost: list[float]) -> None:
    curve = convex_curve(POINTS, np.array(cost))
    steps = np.diff(curve)
    assert curve[0] == 0
    assert (steps >= -1e-9).all() and (np.diff(steps) >= -1e-9).all()
    assert (np.interp(POINTS, GRID, curve) <= np.maximum.accumulate(cost) + 1e-9).all()


def test_curve_goes_through_convex_points() -> None:
    np.testing.assert_allclose(
        np.interp(POINTS, GRID, convex_curve(POINTS, POINTS**3)), POINTS**3, atol=1e-12
    )
    few = convex_curve(np.array([0.25, 0.5]), np.array([1.0, 3.0]))
    np.testing.assert_allclose(few[[0, 50, 100, 190]], [0, 1, 3, 3 + 8 * 0.45], atol=1e-9)


def test_allocation_is_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    curves = rng.uniform(0.5, 3, (3, 1)) * GRID[None, :] ** rng.uniform(1.5, 4, (3, 1))
    picks = np.arange(0, 191, 10)
    for mean in (0.2, 0.5):
        got = allocate(curves, mean)
        assert got.mean() == pytest.approx(mean, abs=1e-9)
        cost = curves[np.arange(3), np.rint(got / GRID[1]).astype(int)].sum()
        wanted = round(mean * 3 / GRID[1])
        best = min(
            sum(curves[layer, at] for layer, at in enumerate(three))
            for three in itertools.product(picks, repeat=3)
            if sum(three) == wanted
        )
        assert cost <= best + 1e-12


def test_allocation_spares_what_is_dear() -> None:
    curves = np.array([1.0, 100.0])[:, None] * GRID[None, :] ** 2
    shares = allocate(curves, 0.4)
    assert shares[0] > 3 * shares[1] > 0
    np.testing.assert_allclose(allocate(curves, 0.0), 0)
    np.testing.assert_allclose(allocate(curves, MOST_SHARE), MOST_SHARE)
    with pytest.raises(ValueError, match="mean share 0.99 must be in"):
        allocate(curves, 0.99)


def test_kinds_are_balanced() -> None:
    base = GRID**2
    curves = np.array([[base, 9 * base], [9 * base, base]])  # each kind spares another layer
    np.testing.assert_allclose(balance_kinds(curves, 0.5), 0.5, atol=0.01)
    curves[1] *= 0.01  # the second kind does not matter: as for the first alone
    np.testing.assert_allclose(balance_kinds(curves, 0.5), allocate(curves[0], 0.5), atol=0.05)


@given(rate=st.floats(3, 15), scale=st.floats(1e-4, 0.02), start=st.floats(0.2, 0.8))
@settings(max_examples=60, deadline=None)
def test_finds_the_largest_share(rate: float, scale: float, start: float) -> None:
    calls = []

    def measure(share: float) -> float:
        calls.append(share)
        return scale * np.exp(rate * share)

    got = largest_share(measure, 0.05, start=start, most_steps=8)
    want = min(np.log(0.05 / scale) / rate, MOST_SHARE)
    assert got == 0 or measure(got) <= 0.05
    assert want - 0.02 <= got <= want + 1e-12  # the logarithm rounds, the limit itself is checked above
    assert len(calls) <= 9 and all(0 < share <= MOST_SHARE for share in calls)


def test_nothing_within_the_limit_drops_nothing() -> None:
    assert largest_share(lambda share: 1e6, 0.05) == 0
    assert largest_share(lambda share: 0.0, 0.05) == pytest.approx(MOST_SHARE)


def test_search_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="limit 0 must be above zero"):
        largest_share(lambda share: 1.0, 0)
    with pytest.raises(ValueError, match="share of 0.500 is NaN"):
        largest_share(lambda share: float("nan"), 0.05)
