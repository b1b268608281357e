"""Choose the predictors' thresholds on held-out text: for a touched share, a recall, or a loss."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from kairox_jax.io import shipped_sparsity
from kairox_jax.io.predictors import LayerPredictor, Predictors
from kairox_jax.models import Decoder
from training.evaluate import Mode, Outcome, run_modes
from training.predictor_choose import common_shares, cut_for_recall, cuts_for_shares
from training.predictor_data import Activations, decode_square
from training.search import largest_share
from training.texts import Windows

SCORED_TOKENS = 2048  # of the held-out text, for the scores' distribution
KEPT_SCORES = 20_000  # of a layer
CURVE_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
FAMILIES = ("equal share", "common price", "half way")  # ways of sharing out among layers
MOST_STEPS = 5  # runs of a search for a loss


@dataclass(frozen=True, eq=False)
class Choice:
    """Thresholds and how they came about.

    Attributes:
        thresholds: float32 [L].
        shares: predicted share of each layer on held-out text, [L].
        family: which way of sharing out was taken.
        tried: what was measured: family, mean share, and the worst kind's rise over dense, nats per token.
        curve: mean share -> thresholds of that family, for evaluation at other shares.
    """

    thresholds: Float[np.ndarray, " L"]
    shares: Float[np.ndarray, " L"]
    family: str
    tried: tuple[dict[str, Any], ...]
    curve: dict[float, list[float]]


def model_thresholds(source: Any) -> Float[np.ndarray, " L"] | None:
    """Return what |z| must exceed to count as active, by layer; None for a SiLU model without thresholds."""
    config = source.config
    if config.activation != "silu":
        return np.zeros(config.num_layers, np.float32)
    sparsity = shipped_sparsity(source)
    return None if sparsity is None else sparsity.thresholds


def worst_rise(dense: Outcome, other: Outcome, windows: Windows) -> float:
    """Return the largest rise of the loss over dense among the kinds of text."""
    difference = other.losses - dense.losses
    return max(float(difference[windows.rows(kind)].mean(dtype=np.float64)) for kind in windows.present())


def held_scores(predictors: Predictors, held: Activations) -> list[np.ndarray]:
    """Return a sorted sample of each layer's scores on held-out text."""
    result = []
    for layer in range(len(predictors.layers)):
        x = held.inputs(layer)
        score = predictors.predict(layer, x[:: max(1, len(x) // SCORED_TOKENS)].astype(np.float32)).reshape(
            -1
        )
        result.append(np.sort(score[:: max(1, score.size // KEPT_SCORES)]))
    return result


def choose_thresholds(
    decoder: Decoder,
    layers: list[LayerPredictor],
    held: Activations,
    offsets: Float[np.ndarray, " L"],
    windows: Windows,
    active_above: Float[np.ndarray, " L"] | None,
    options: argparse.Namespace,
    families: tuple[str, ...] = FAMILIES,
) -> Choice:
    """Choose thresholds on held-out text.

    Args:
        decoder: the dense model.
        layers: packed predictors.
        held: activations of the held-out text.
        offsets: logarithm of each layer's unit of contributions.
        windows: the held-out text, on which candidates are measured.
        active_above: see ``evaluate.run_modes``.
        options: one of ``share``, ``recall``, ``max_loss`` is not None.
        families: the ways of sharing out that are tried, of ``FAMILIES``.

    Raises:
        ValueError: the loss limit is not met at any share.
    """
    predictors = Predictors(layers=tuple(layers), input=held.reads, norm="rms")
    scores = held_scores(predictors, held)  # the files hold normalised inputs, and normalising twice is once

    def shares_of(family: str, share: float) -> np.ndarray:
        equal, common = np.full(len(layers), share), common_shares(scores, offsets, share)
        return {"equal share": equal, "common price": common, "half way": (equal + common) / 2}[family]

    tried: list[dict[str, Any]] = []

    def measure(cuts: dict[str, np.ndarray], share: float) -> list[float]:
        modes = [Mode(name=n, rule="predicted", predictors=predictors, thresholds=c) for n, c in cuts.items()]
        modes.insert(0, Mode(name="dense", rule="dense"))
        outcomes = run_modes(
            decoder, windows, modes, active_above=active_above, batch=options.batch, tick=lambda n: None
        )
        rises = [worst_rise(outcomes[0], other, windows) for other in outcomes[1:]]
        tried.extend(
            {"family": n, "share": round(share, 4), "worst_rise": round(r, 4)}
            for n, r in zip(cuts, rises, strict=True)
        )
        return rises

    if options.recall is not None:
        norms = [np.linalg.norm(np.asarray(block.ffn.w_down[...]), axis=1) for block in decoder.blocks]
        cuts = np.array(
            [_recall_cut(predictors, held, layer, n, options.recall) for layer, n in enumerate(norms)]
        )
        cuts = cuts.astype(np.float32)
        shares = np.array([1 - np.searchsorted(s, c) / len(s) for s, c in zip(scores, cuts, strict=True)])
        return Choice(cuts, shares, "recall", (), _curve(scores, lambda share: np.full(len(layers), share)))
    share = 0.5 if options.share is None else options.share
    candidates = {family: cuts_for_shares(scores, shares_of(family, share)) for family in families}
    rises = measure(candidates, share)
    family = families[int(np.argmin(rises))]
    if options.max_loss is not None:
        dropped = largest_share(
            lambda d: measure({family: cuts_for_shares(scores, shares_of(family, 1 - d))}, 1 - d)[0],
            options.max_loss,
            most_steps=MOST_STEPS,
        )
        if dropped == 0:
            raise ValueError(
                f"no share that was tried keeps within --max-loss {options.max_loss}: give a larger one"
            )
        share = 1 - dropped
    shares = shares_of(family, share)
    return Choice(
        cuts_for_shares(scores, shares),
        shares,
        family,
        tuple(tried),
        _curve(scores, lambda s: shares_of(family, s)),
    )


def _curve(scores: list[np.ndarray], shares_for: Any) -> dict[float, list[float]]:
    return {s: [round(float(c), 4) for c in cuts_for_shares(scores, shares_for(s))] for s in CURVE_SHARES}


def _recall_cut(
    predictors: Predictors, held: Activations, layer: int, norms: Float[np.ndarray, " F"], recall: float
) -> float:
    x, codes = held.inputs(layer), held.sizes(layer)
    every = max(1, len(x) // SCORED_TOKENS)
    score = predictors.predict(layer, x[::every].astype(np.float32))
    return cut_for_recall(
        score, np.sqrt(np.asarray(decode_square(jnp.asarray(codes[::every])))) * norms, recall
    )
