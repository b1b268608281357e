"""Histogram thresholds against NumPy's quantiles."""

import numpy as np
import pytest

from training.statistics import BINS, bin_edges, standard_error, threshold_for_share, thresholds_for_shares


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9, 0.999])
def test_threshold_is_the_quantile(share: float, rng: np.random.Generator) -> None:
    values = np.abs(rng.normal(size=200_000)) ** 3
    histogram, _ = np.histogram(np.maximum(values, bin_edges()[0]), bin_edges())
    got = threshold_for_share(histogram, share)
    assert got == pytest.approx(np.quantile(values, share), rel=0.025)


def test_edges_of_the_range() -> None:
    histogram = np.zeros(BINS, np.int64)
    histogram[7] = 4
    edges = bin_edges()
    assert threshold_for_share(histogram, 0) == 0
    assert edges[7] < threshold_for_share(histogram, 0.5) < edges[8]
    both = thresholds_for_shares(np.stack([histogram, histogram]), np.array([0.0, 0.5]))
    assert both.dtype == np.float32 and both[0] == 0 < both[1]


def test_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="histogram of activations is empty"):
        threshold_for_share(np.zeros(BINS, np.int64), 0.5)
    with pytest.raises(ValueError, match="share 1.0 must be in"):
        threshold_for_share(np.ones(BINS, np.int64), 1.0)


def test_standard_error_counts_windows(rng: np.random.Generator) -> None:
    means = rng.normal(size=9)
    assert standard_error(np.repeat(means[:, None], 50, axis=1)) == pytest.approx(means.std(ddof=1) / 3)
    assert standard_error(np.zeros((1, 50))) == np.inf
