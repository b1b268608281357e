"""`kairox eval`: a model's loss, agreement and recall on text in several modes, as a table or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from kairox_jax.io import Predictors, open_checkpoint
from kairox_jax.models import find_predictors, find_sparsity, load_decoder
from training.evaluate import Mode, run_modes
from training.evaluate_figures import figures_table, mode_figures, row_sizes
from training.predictor_time import forecast_ms_per_layer
from training.sources import KINDS, user_documents
from training.texts import Windows


def run(args: argparse.Namespace) -> int:
    """Evaluate and print; return 0.

    Raises:
        ValueError: a text, a mode or the model does not do.
    """
    source = open_checkpoint(args.model)
    tokenizer = source.tokenizer()
    windows = text_windows(
        [Path(path) for path in args.text],
        lambda text: tokenizer.encode(text, add_bos=False),
        tokens=args.window,
        most=args.tokens,
        bos_id=source.config.bos_id if source.config.add_bos else None,
    )
    above = active_thresholds(source, args.sparsity)
    predictors = find_predictors(source, args.predictors) if "predicted" in args.modes or args.curve else None
    modes = chosen_modes(args.modes, predictors)
    curve = curve_modes(args.curve, predictors) if args.curve else []
    decoder = load_decoder(source)
    everything = [*modes, *curve]
    bar = tqdm(
        total=len(everything) * len(windows.ids),
        desc="eval",
        unit="window",
        file=sys.stderr,
        disable=bool(args.quiet),
    )
    with bar:
        outcomes = run_modes(
            decoder, windows, everything, active_above=above, batch=args.batch, tick=bar.update
        )
    sizes = row_sizes(source)
    figures = [
        mode_figures(mode, outcome, outcomes[0], windows, sizes)
        for mode, outcome in zip(everything, outcomes, strict=True)
    ]
    wanted = {mode.name: f for mode, f in zip(modes, figures, strict=False) if mode.name in args.modes}
    times = forecast_ms_per_layer(predictors) if predictors is not None and "predicted" in wanted else None
    if times is not None:
        wanted["predicted"]["forecast_ms_per_layer"] = times
    points = [
        {"choice": mode.rule, "asked": mode.name.split()[-1], **f}
        for mode, f in zip(curve, figures[len(modes) :], strict=True)
    ]
    if args.json:
        result: dict[str, Any] = {
            "model": Path(args.model).name,
            "window_tokens": args.window,
            "tokens": {kind: len(windows.rows(kind)) * args.window for kind in windows.present()},
            "modes": wanted,
        }
        print(json.dumps(result | ({"curve": points} if curve else {})))
        return 0
    named = [*wanted.items(), *((f"{p['choice']} {p['asked']}", p) for p in points)]
    print(figures_table(named))
    if times is not None:
        print(f"a forecast takes {times['host']} ms a layer on the host, {times['jax']} ms in JAX")
    return 0


def text_windows(
    paths: Sequence[Path],
    encode: Callable[[str], Sequence[int]],
    *,
    tokens: int,
    most: int,
    bos_id: int | None,
) -> Windows:
    """Cut each text from its beginning into windows that follow each other.

    Args:
        paths: text files; their endings decide the kinds.
        encode: text to token ids.
        tokens: T, tokens of a window; with ``bos_id``, that is one of them.
        most: tokens of each file that are used.
        bos_id: put before every window, or None.

    Raises:
        ValueError: no text, one that is empty or not UTF-8, or one that is shorter than a window.
    """
    if not paths:
        raise ValueError("there is no text: give UTF-8 files after the model")
    body = tokens - (bos_id is not None)
    found: dict[str, list[list[int]]] = {kind: [] for kind in KINDS}
    for path in paths:
        pieces = user_documents([path])
        ids = list(encode("".join(piece.text for piece in pieces)))
        rows = [ids[s : s + body] for s in range(0, min(len(ids), max(most, body)) - body + 1, body)]
        if not rows:
            raise ValueError(
                f"text {path} has {len(ids)} tokens, a window {tokens}: give a longer text, or a smaller --window"
            )
        found[pieces[0].kind] += [([] if bos_id is None else [bos_id]) + row for row in rows]
    kinds = tuple(kind for kind in KINDS for _ in found[kind])
    return Windows(np.array([row for kind in KINDS for row in found[kind]], np.int32), kinds, ())


def active_thresholds(source: Any, folder: str | None) -> Float[np.ndarray, " L"] | None:
    """Return what |z| must exceed to be active, by layer; None for a SiLU model that has no thresholds.

    Raises:
        ValueError: a folder for a model that is sparse by itself, or one of another model.
    """
    config = source.config
    if config.activation == "silu":
        sparsity = find_sparsity(source, folder)
        return None if sparsity is None else sparsity.thresholds
    if folder is not None:
        raise ValueError(
            f"--sparsity {folder} has no effect: activation {config.activation!r} is zero by itself"
        )
    return np.zeros(config.num_layers, np.float32)


def chosen_modes(names: Sequence[str], predictors: Predictors | None) -> list[Mode]:
    """Return dense, which the others are compared with, and the chosen ones."""
    modes = [Mode(name="dense", rule="dense")]
    if "exact" in names:
        modes.append(Mode(name="exact", rule="active"))
    if "predicted" in names:
        modes.append(Mode(name="predicted", rule="predicted", predictors=predictors))
    return modes


def curve_modes(shares: Sequence[float], predictors: Predictors | None) -> list[Mode]:
    """Return predicted, oracle and random at each share.

    Raises:
        ValueError: the predictors' file has no thresholds for other shares.
    """
    assert predictors is not None
    curve = predictors.meta.get("curve")
    if not isinstance(curve, dict) or len(curve) < 2:
        raise ValueError("these predictors hold no thresholds for other shares: leave out --curve")
    known = np.array([float(share) for share in curve])
    cuts = np.array(list(curve.values()), np.float64)
    order = np.argsort(known)
    modes = []
    for share in shares:
        at = [np.interp(share, known[order], cuts[order, layer]) for layer in range(cuts.shape[1])]
        thresholds = np.array(at, np.float32)
        modes += [
            Mode(name=f"predicted {share:g}", rule="predicted", predictors=predictors, thresholds=thresholds),
            Mode(name=f"oracle {share:g}", rule="oracle", share=share),
            Mode(name=f"random {share:g}", rule="random", share=share),
        ]
    return modes
