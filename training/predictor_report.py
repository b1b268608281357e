"""What a training run reports: the file's facts, the JSON report, the plot, and the table for the terminal."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kairox_jax.io.predictors import Predictors
from kairox_jax.io.sparsity import fingerprint
from training.evaluate_figures import figures_table
from training.predictor_fit import Fitted
from training.report import installed_versions
from training.texts import Windows, summary

if TYPE_CHECKING:
    from training.predictor_thresholds import Choice


FIT_FIGURES = ("steps", "first_loss", "held_out_loss")  # of a layer that was fitted by itself


def describe(
    predictors: Predictors,
    choice: Choice,
    fitted: list[Fitted],
    source: Any,
    windows: dict[str, Windows],
    options: argparse.Namespace,
    given: Predictors | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts for the predictors' own file, and the longer report; ``given`` are those gone on from."""
    layers = [
        {
            "rank": part.figures["rank"],
            "bytes": packed.nbytes,
            **{name: round(part.figures[name], 4) for name in FIT_FIGURES if name in part.figures},
            "share": round(float(share), 4),
        }
        for part, packed, share in zip(fitted, predictors.layers, choice.shares, strict=True)
    ]
    meta = {
        "model": Path(options.model).name,
        "fingerprint": fingerprint(source),
        "num_neurons": source.config.num_neurons,
        "command": command(options),
        "versions": installed_versions(),
        "predictor_bytes": predictors.nbytes,
        "share": round(float(np.mean(choice.shares)), 4),
        "family": choice.family,
        "curve": {str(share): cuts for share, cuts in choice.curve.items()},
        "layers": layers,
    }
    if (distilled := fitted[0].figures.get("distilled")) is not None:
        meta["end_to_end"] = {name: round(float(value), 4) for name, value in distilled.items()}
    if given is not None:
        meta["started_from"] = {
            name: given.meta.get(name) for name in ("command", "end_to_end", "started_from")
        }
    report = {
        **{key: value for key, value in meta.items() if key != "curve"},
        "tried": list(choice.tried),
        "texts": {split: summary(part) for split, part in windows.items()},
    }
    return meta, report


def command(options: argparse.Namespace) -> str:
    """Return the command line without the machine's paths: texts by their names, no folders."""
    words = [
        "kairox",
        "train-predictors",
        Path(options.model).name,
        *(Path(path).name for path in options.text),
    ]
    for key in sorted(options.given - {"out", "work", "text_only", "debug"}):
        value = Path(options.start).name if key == "start" else getattr(options, key)
        words += [f"--{key.replace('_', '-')}", _word(value)]
    return shlex.join([*words, "--text-only"] if options.text_only else words)


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{kind}={share:g}" for kind, share in value.items())
    return value if isinstance(value, str) else f"{value:g}"


def table(report: dict[str, Any]) -> str:
    """Return the layers' figures as lines of text."""
    lines = ["layer  rank    kB  held-out loss: first  trained  share"]
    for index, row in enumerate(report["layers"]):
        first, trained = (
            f"{row[name]:.4f}" if name in row else "-" for name in ("first_loss", "held_out_loss")
        )
        lines.append(
            f"{index:5}  {row['rank']:4}  {row['bytes'] / 1e3:4.0f}  {first:>20}  {trained:>7}  {row['share']:5.3f}"
        )
    if (together := report.get("end_to_end")) is not None:
        lines.append(
            f"all layers together: {together['steps']:.0f} steps, held-out loss {together['first_loss']:.4f} at first, "
            f"{together['held_out_loss']:.4f} trained"
        )
    times = report["forecast_ms_per_layer"]
    lines.append(f"a forecast takes {times['host']} ms a layer on the host, {times['jax']} ms in JAX")
    lines.append(figures_table(list(report["modes"].items())))
    lines += [
        f"{row['family']}: share {row['share']}, worst rise {row['worst_rise']:+.4f}"
        for row in report["tried"]
    ]
    return "\n".join(lines)


def plot(report: dict[str, Any], path: Path) -> bool:
    """Draw each layer's share, recall and precision where they were measured; return whether it was drawn.

    Without matplotlib (the extra ``lab``) nothing is drawn.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for key, label in (("predicted_frac", "predicted share"), ("recall", "recall"), ("precision", "precision"),
                       ("recall_by_contribution", "recall by contribution")):  # fmt: skip
        values = [row[key] for row in report["layer_figures"]]
        if all(value is not None for value in values):
            axes.plot(range(len(values)), values, marker=".", label=label)
    axes.set(xlabel="layer", ylim=(0, 1), title=f"{report['model']}: predictors on held-out text")
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
