"""Medians and spreads of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """Return the median, the quartiles, the extremes and the samples themselves.

    Raises:
        ValueError: no sample, or one that is not a finite number.
    """
    if not samples or not np.isfinite(samples).all():
        raise ValueError(f"samples {list(samples)}: expected at least one, all of them finite")
    low, q1, median, q3, high = (float(np.quantile(samples, q)) for q in (0, 0.25, 0.5, 0.75, 1))
    return {"median": median, "q1": q1, "q3": q3, "min": low, "max": high, "samples": list(samples)}


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Return the spread of ours / theirs, round by round: drift of the machine meets both in a round.

    Raises:
        ValueError: different numbers of rounds.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} and {len(theirs)} rounds: pairs need the same rounds")
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def mean_parts(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return each part's mean over rounds that have the same parts: means add up, medians do not."""
    return {part: float(np.mean([one[part] for one in rounds])) for part in rounds[0]}
