"""Ranks under a byte budget, and thresholds for a touched share or a recall. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

RANK_STEP = 32  # whole blocks of the packed rows
MOST_RANK = 128


def choose_ranks(
    gains: Sequence[Float[np.ndarray, " rank"]],
    scales: Float[np.ndarray, " L"],
    unit_bytes: int,
    most_bytes: int,
) -> list[int]:
    """Spend bytes where another 32 hidden units explain most.

    Args:
        gains: what each further unit explains, by layer, falling.
        scales: what it is worth in each layer.
        unit_bytes: bytes of 32 hidden units.
        most_bytes: for all layers together.

    Returns:
        A multiple of 32 for each layer, at least 32 and at most 128.

    Raises:
        ValueError: the budget does not pay 32 units in each layer.
    """
    layers = len(gains)
    left = most_bytes // unit_bytes - layers
    if left < 0:
        raise ValueError(
            f"a budget of {most_bytes} bytes is under the {layers * unit_bytes} of 32 hidden units a layer: "
            "give a larger --bytes"
        )
    worth = np.zeros((layers, MOST_RANK // RANK_STEP - 1))
    for layer, gain in enumerate(gains):
        padded = np.zeros(MOST_RANK)
        padded[: min(len(gain), MOST_RANK)] = gain[:MOST_RANK]
        worth[layer] = padded.reshape(-1, RANK_STEP).sum(1)[1:] * scales[layer]
    best = np.argsort(-worth.reshape(-1), kind="stable")[
        :left
    ]  # gains fall, so a layer's steps come in order
    taken = np.bincount(best // worth.shape[1], minlength=layers)
    return [RANK_STEP * (1 + int(steps)) for steps in taken]


def cuts_for_shares(
    scores: Sequence[Float[np.ndarray, " n"]], shares: Float[np.ndarray, " L"]
) -> Float[np.ndarray, " L"]:
    """Return the thresholds that predict a share of each layer's sorted scores, float32 [L]."""
    pairs = zip(scores, shares, strict=True)
    return np.array([s[min(len(s) - 1, round((1 - p) * len(s)))] for s, p in pairs], np.float32)


def common_shares(
    scores: Sequence[Float[np.ndarray, " n"]], offsets: Float[np.ndarray, " L"], share: float
) -> Float[np.ndarray, " L"]:
    """Return each layer's share under one price for all: score + offset >= price, their mean as asked.

    The score is the logarithm of an expected contribution in the layer's unit, the offset the unit's logarithm, so
    that every neuron that is predicted anywhere is worth more than every one that is not.
    """
    low = min(float(s[0] + o) for s, o in zip(scores, offsets, strict=True))
    high = max(float(s[-1] + o) for s, o in zip(scores, offsets, strict=True))
    shares = np.zeros(len(scores))
    for _ in range(50):
        price = (low + high) / 2
        shares = np.array(
            [1 - np.searchsorted(s, price - o) / len(s) for s, o in zip(scores, offsets, strict=True)]
        )
        low, high = (price, high) if shares.mean() > share else (low, price)
    return shares


def cut_for_recall(
    score: Float[np.ndarray, "n F"], contribution: Float[np.ndarray, "n F"], recall: float
) -> float:
    """Return the highest threshold at which a share ``recall`` of the contribution is predicted.

    Raises:
        ValueError: nothing contributes.
    """
    order = np.argsort(score, axis=None)[::-1]
    total = np.cumsum(contribution.reshape(-1)[order], dtype=np.float64)
    if not total[-1] > 0:
        raise ValueError("no neuron contributes on the held-out text: the model or the text is broken")
    return float(
        score.reshape(-1)[order[min(len(order) - 1, int(np.searchsorted(total, recall * total[-1])))]]
    )
