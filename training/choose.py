"""Choose one threshold a layer: the sparsest within a limit of loss, or the least lossy of a given share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from training.forward import LayeredModel
from training.measure import Measurement, Tick, evaluate, histograms, sensitivities
from training.search import GRID, MOST_SHARE, balance_kinds, convex_curve, largest_share
from training.statistics import standard_error, thresholds_for_shares
from training.texts import Windows

SHARES = np.arange(0.1, 0.91, 0.1)  # dropped shares at which a layer's cost is estimated
SENSITIVITY_WINDOWS = 8  # of each kind: a backward pass costs four forward ones
MOST_STEPS = 6  # measured candidates of one search


@dataclass(frozen=True, eq=False)
class Choice:
    """Thresholds and how they came about.

    Attributes:
        thresholds: float32 [L].
        shares: dropped share of each layer's neurons that dense leaves active, on the calibration text [L].
        tried: mean dropped share and the worst kind's rise plus its standard error, for each candidate.
    """

    thresholds: Float[np.ndarray, " L"]
    shares: Float[np.ndarray, " L"]
    tried: tuple[tuple[float, float], ...]


def rises(dense: Measurement, other: Measurement, windows: Windows) -> dict[str, tuple[float, float]]:
    """Return for each kind how much the loss rose, nats per token, and its standard error over windows."""
    difference = other.losses - dense.losses
    result = {}
    for kind in windows.present():
        of_kind = difference[windows.rows(kind)]
        result[kind] = (float(of_kind.mean(dtype=np.float64)), standard_error(of_kind))
    return result


def choose_thresholds(
    model: LayeredModel,
    calibration: Windows,
    selection: Windows,
    *,
    max_loss: float,
    active_frac: float | None = None,
    batch: int,
    tick: Tick,
    settle: Callable[[int], object],
) -> tuple[Choice, Choice]:
    """Search layer budgets (Lagrangian, from sensitivities), and one equal share as the baseline.

    A candidate is within the limit where, on each kind of the selection text, the rise of the loss over dense
    plus one standard error is at most ``max_loss``.

    Args:
        model: a dense SiLU model, or one of ReLU or FATReLU, whose gate is then thresholded.
        calibration: text for histograms and sensitivities.
        selection: other text, on which candidates are measured.
        max_loss: limit, nats per token, above zero.
        active_frac: share of the neurons to leave active per token, in place of a limit.
        batch: windows run at a time.
        tick: called with the work done, in windows evaluated.
        settle: called after each search with the candidates that it did not need.

    Returns:
        The choice with a budget for each layer, and the one with the same share in each layer.

    Raises:
        ValueError: too little selection text, a share out of reach, or a loss that is not finite.
    """
    for kind in calibration.present():
        if len(selection.rows(kind)) < 2:
            raise ValueError(f"there are under 2 windows of {kind} to select on: give more text with --text")
    counts = histograms(model, calibration, batch=batch, tick=tick)
    edges = np.stack([thresholds_for_shares(counts, np.full(len(counts), share)) for share in SHARES], axis=1)
    dense_frac = counts.sum(axis=1) / (calibration.ids.size * model.config.num_neurons)
    some = calibration.first(SENSITIVITY_WINDOWS)
    cost = sensitivities(model, some, edges, batch=batch, tick=tick)
    dense = evaluate(model, selection, None, batch=batch, tick=tick)

    def cut(shares: np.ndarray) -> np.ndarray:
        # A FATReLU model's own threshold holds in any case.
        return np.maximum(
            thresholds_for_shares(counts, shares), np.float32(model.config.activation_threshold)
        )

    def search(shares_for: Callable[[float], np.ndarray]) -> Choice:
        tried: list[tuple[float, float]] = []

        def measure(share: float) -> float:
            thresholds = cut(shares_for(share))
            found = rises(dense, evaluate(model, selection, thresholds, batch=batch, tick=tick), selection)
            tried.append((share, max(rise + error for rise, error in found.values())))
            return tried[-1][1]

        if active_frac is None:
            share = largest_share(measure, max_loss, most_steps=MOST_STEPS)
        else:
            share = share_for_active(lambda share: (dense_frac * (1 - shares_for(share))).mean(), active_frac)
            measure(share)
        settle(MOST_STEPS - len(tried))
        shares = shares_for(share)
        return Choice(cut(shares), shares, tuple(tried))

    layers = model.config.num_layers
    equal = search(lambda share: np.full(layers, share))
    curves = np.array([[convex_curve(SHARES, layer) for layer in kind] for kind in cost])
    curves *= _scales(model, selection, dense, counts, curves, batch=batch, tick=tick)[:, None, None]
    chosen = search(lambda share: balance_kinds(curves, share))
    return chosen, equal


def share_for_active(active_frac_for: Callable[[float], float], wanted: float) -> float:
    """Return the dropped share that leaves a wanted share of the neurons active, by bisection.

    Args:
        active_frac_for: active share for a mean dropped share in [0, ``MOST_SHARE``]; it falls.
        wanted: share of the neurons, in (0, 1).

    Raises:
        ValueError: dropping nothing leaves fewer active, or dropping ``MOST_SHARE`` leaves more.
    """
    low, high = 0.0, MOST_SHARE
    most, least = active_frac_for(low), active_frac_for(high)
    if not least <= wanted < most:
        raise ValueError(
            f"--active-frac {wanted:g} is out of reach: this model can be cut to between {least:.3f} and {most:.3f}"
        )
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if active_frac_for(middle) > wanted else (low, middle)
    return high


def _scales(
    model: LayeredModel,
    selection: Windows,
    dense: Measurement,
    counts: np.ndarray,
    curves: Float[np.ndarray, "K L G"],
    *,
    batch: int,
    tick: Tick,
    share: float = 0.5,
) -> Float[np.ndarray, " K"]:
    """Return for each kind its measured rise over the estimate, so that kinds can be compared."""
    shares = balance_kinds(curves, share)
    thresholds = thresholds_for_shares(counts, shares)
    found = rises(dense, evaluate(model, selection, thresholds, batch=batch, tick=tick), selection)
    at = np.rint(shares / GRID[1]).astype(int)
    expected = curves[:, np.arange(len(shares)), at].sum(1)
    measured = np.array([found[kind][0] for kind in selection.present()])
    return np.maximum(measured, 1e-4) / np.maximum(expected, 1e-12)
