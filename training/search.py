"""Spread a share of dropped neurons over layers at least cost, and find the largest share within a limit.

Pure NumPy; the model is measured through a function that the caller gives.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

MOST_SHARE = 0.95
GRID = np.linspace(0, MOST_SHARE, 191)


def convex_curve(shares: Float[np.ndarray, " J"], cost: Float[np.ndarray, " J"]) -> Float[np.ndarray, " G"]:
    """Return a convex, rising curve on ``GRID`` through the lower border of measured points.

    Args:
        shares: measured shares, rising, within (0, 1).
        cost: cost of each; dropping nothing costs 0.
    """
    x = np.concatenate([[0.0], shares])
    y = np.concatenate([[0.0], np.maximum.accumulate(np.maximum(cost, 0))])
    hull: list[int] = []
    for point in range(len(x)):
        while len(hull) >= 2:
            a, b = hull[-2], hull[-1]
            if (y[b] - y[a]) * (x[point] - x[a]) < (y[point] - y[a]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(point)
    slope = (y[hull[-1]] - y[hull[-2]]) / (x[hull[-1]] - x[hull[-2]])
    beyond = y[hull[-1]] + slope * (GRID - x[hull[-1]])  # past the last point as steeply as before it
    return np.where(x[-1] >= GRID, np.interp(GRID, x[hull], y[hull]), beyond)


def allocate(curves: Float[np.ndarray, "L G"], mean_share: float) -> Float[np.ndarray, " L"]:
    """Return each layer's share so that their mean is ``mean_share`` and the summed cost is least.

    Every layer gets the share at which its curve's slope reaches one common price (Lagrange); steps that
    share the last price go to the first layers.

    Args:
        curves: convex cost on ``GRID`` for each layer.
        mean_share: in [0, ``MOST_SHARE``].

    Raises:
        ValueError: ``mean_share`` is out of range.
    """
    if not 0 <= mean_share <= MOST_SHARE:
        raise ValueError(f"mean share {mean_share} must be in [0, {MOST_SHARE}]")
    slopes = np.diff(curves, axis=1)
    wanted = round(mean_share / GRID[1] * len(curves))
    cheapest = np.argsort(slopes.reshape(-1), kind="stable")[:wanted]
    taken = np.bincount(cheapest // slopes.shape[1], minlength=len(curves))
    return GRID[taken]


def balance_kinds(
    curves: Float[np.ndarray, "K L G"], mean_share: float, rounds: int = 60
) -> Float[np.ndarray, " L"]:
    """Return each layer's share so that the cost of the worst kind of text is least.

    Args:
        curves: convex cost on ``GRID`` for each kind and layer.
        mean_share: mean of the shares.
        rounds: multiplicative updates of the kinds' weights.
    """
    weights = np.full(len(curves), 1 / len(curves))
    best, least = allocate(curves.sum(0), mean_share), np.inf
    for _ in range(rounds):
        shares = allocate(np.tensordot(weights, curves, 1), mean_share)
        at = np.rint(shares / GRID[1]).astype(int)
        cost = curves[:, np.arange(len(shares)), at].sum(1)
        if cost.max() < least:
            best, least = shares, cost.max()
        weights *= np.exp(0.5 * (cost / max(cost.max(), 1e-30) - 1))
        weights /= weights.sum()
    return best


def largest_share(
    measure: Callable[[float], float],
    limit: float,
    *,
    start: float = 0.5,
    tolerance: float = 0.005,
    most_steps: int = 6,
) -> float:
    """Find the largest share whose measured cost is within a limit; the cost rises with the share.

    The logarithm of the cost is nearly straight in the share, so each step goes to where a line through the
    closest measured shares meets the limit.

    Args:
        measure: cost of a share in (0, ``MOST_SHARE``]; each call is one run over the text.
        limit: the largest cost allowed, above zero.
        start: the share to try first.
        tolerance: stop when shares this close lie on both sides of the limit.
        most_steps: the most calls.

    Returns:
        A measured share within the limit; 0 (dropping nothing) where none was.

    Raises:
        ValueError: the limit is not above zero, or a cost is NaN.
    """
    if not limit > 0:
        raise ValueError(f"limit {limit} must be above zero: thresholds always cost something")
    low, high = 0.0, 1.0
    measured: list[tuple[float, float]] = []  # share, log of cost / limit
    share = start
    for _ in range(most_steps):
        cost = measure(share)
        if np.isnan(cost):
            raise ValueError(f"the cost of dropping a share of {share:.3f} is NaN")
        measured.append((share, float(np.log(max(cost, 1e-6) / limit))))
        low, high = (share, high) if cost <= limit else (low, share)
        if high - low <= tolerance or low >= MOST_SHARE:
            break
        share = min(_next_share(measured, low, high, tolerance), MOST_SHARE)
    return low


def _next_share(measured: list[tuple[float, float]], low: float, high: float, tolerance: float) -> float:
    """Return where a line through the two shares closest to the limit meets a little less than the limit."""
    near = sorted(measured, key=lambda point: abs(point[1]))
    share, excess = near[0]
    rate = 7.0  # of the default model, for the first step
    if len(near) > 1:
        rate = float(np.clip((near[1][1] - excess) / (near[1][0] - share), 1.0, 30.0))
    return float(np.clip(share - (excess + 0.02) / rate, low + tolerance / 2, high - tolerance / 2))
