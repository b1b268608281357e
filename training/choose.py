"""Choose one threshold a layer: the sparsest whose loss on held-out text stays within a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from training.forward import LayeredModel
from training.measure import Measurement, Tick, evaluate, histograms, sensitivities
from training.search import GRID, balance_kinds, convex_curve, largest_share
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
        shares: dropped share of each layer on the calibration text, [L].
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
    batch: int,
    tick: Tick,
    settle: Callable[[int], object],
) -> tuple[Choice, Choice]:
    """Search layer budgets (Lagrangian, from sensitivities), and one equal share as the baseline.

    A candidate is within the limit where, on each kind of the selection text, the rise of the loss over dense
    plus one standard error is at most ``max_loss``.

    Args:
        model: a dense SiLU model.
        calibration: text for histograms and sensitivities.
        selection: other text, on which candidates are measured.
        max_loss: limit, nats per token, above zero.
        batch: windows run at a time.
        tick: called with the work done, in windows evaluated.
        settle: called after each search with the candidates that it did not need.

    Returns:
        The choice with a budget for each layer, and the one with the same share in each layer.

    Raises:
        ValueError: too little selection text, or a loss that is not finite.
    """
    for kind in calibration.present():
        if len(selection.rows(kind)) < 2:
            raise ValueError(f"there are under 2 windows of {kind} to select on: give more text with --text")
    counts = histograms(model, calibration, batch=batch, tick=tick)
    edges = np.stack([thresholds_for_shares(counts, np.full(len(counts), share)) for share in SHARES], axis=1)
    some = calibration.first(SENSITIVITY_WINDOWS)
    cost = sensitivities(model, some, edges, batch=batch, tick=tick)
    dense = evaluate(model, selection, None, batch=batch, tick=tick)

    def search(shares_for: Callable[[float], np.ndarray]) -> Choice:
        tried: list[tuple[float, float]] = []

        def measure(share: float) -> float:
            thresholds = thresholds_for_shares(counts, shares_for(share))
            found = rises(dense, evaluate(model, selection, thresholds, batch=batch, tick=tick), selection)
            tried.append((share, max(rise + error for rise, error in found.values())))
            return tried[-1][1]

        share = largest_share(measure, max_loss, most_steps=MOST_STEPS)
        settle(MOST_STEPS - len(tried))
        shares = shares_for(share)
        return Choice(thresholds_for_shares(counts, shares), shares, tuple(tried))

    layers = model.config.num_layers
    equal = search(lambda share: np.full(layers, share))
    curves = np.array([[convex_curve(SHARES, layer) for layer in kind] for kind in cost])
    curves *= _scales(model, selection, dense, counts, curves, batch=batch, tick=tick)[:, None, None]
    chosen = search(lambda share: balance_kinds(curves, share))
    return chosen, equal


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
