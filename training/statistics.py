"""Histograms of log2 |z| and the thresholds that drop a given share. NumPy only."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

LEAST_OCTAVE = -24.0  # smaller values share the first bin
BINS_PER_OCTAVE = 32
BINS = 34 * BINS_PER_OCTAVE  # up to 2^10; larger values share the last bin


def bin_edges() -> Float[np.ndarray, " bins+1"]:
    """Return the borders of the bins as values of |z|, float64 [bins + 1]."""
    return 2.0 ** (LEAST_OCTAVE + np.arange(BINS + 1) / BINS_PER_OCTAVE)


def threshold_for_share(histogram: Int[np.ndarray, " bins"], share: float) -> float:
    """Return the threshold that drops a share of a layer's values, to within a bin (2 % of its value).

    Args:
        histogram: counts of |z|, [bins].
        share: in [0, 1); 0 gives 0.

    Raises:
        ValueError: the histogram is empty, or the share is out of range.
    """
    total = histogram.sum()
    if total <= 0:
        raise ValueError("the histogram of activations is empty: run the model over text first")
    if not 0 <= share < 1:
        raise ValueError(f"share {share} must be in [0, 1): it is the part of the neurons that is dropped")
    if share == 0:
        return 0.0
    below = np.concatenate([[0.0], np.cumsum(histogram) / total])
    first = int(np.searchsorted(below, share)) - 1  # below[first] < share <= below[first + 1]
    part = (share - below[first]) / (below[first + 1] - below[first])
    octave = LEAST_OCTAVE + (first + part) / BINS_PER_OCTAVE
    return float(2.0**octave)


def thresholds_for_shares(
    histograms: Int[np.ndarray, "L bins"], shares: Float[np.ndarray, " L"]
) -> Float[np.ndarray, " L"]:
    """Return one threshold a layer, float32 [L], for one share a layer."""
    pairs = zip(histograms, shares, strict=True)
    return np.array([threshold_for_share(h, float(s)) for h, s in pairs], np.float32)


def standard_error(differences: Float[np.ndarray, "W T"]) -> float:
    """Return the standard error of the mean over windows; infinite for a single window."""
    means = np.asarray(differences, np.float64).mean(axis=1)
    return float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else float("inf")
