"""What a thresholds run reports: the files' facts, the JSON report, and the table for the terminal."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairox_jax.config import ModelConfig
from training.choose import Choice, rises
from training.measure import Measurement
from training.sources import KINDS
from training.texts import Windows, summary

if TYPE_CHECKING:
    from training.thresholds import Result

_COLUMNS = ("kind", "dense", "thresholded", "rise", "active", "equal share: rise", "active")


def describe(
    result: Result, config: ModelConfig, fingerprint: str, options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts for ``thresholds.json`` and the longer ``report.json``."""
    test = result.windows["test"]
    common = {
        "model": options.model,
        "fingerprint": fingerprint,
        "num_layers": config.num_layers,
        "num_neurons": config.num_neurons,
        "activation": config.activation,
        "command": _command(options),
        "versions": installed_versions(),
        "max_loss": options.max_loss if result.chosen and options.active_frac is None else None,
        "losses": losses(result.dense, result.thresholded, test),
    }
    frequency = result.sparsity.frequency
    assert frequency is not None
    meta = {
        **common,
        "texts": {split: summary(windows) for split, windows in result.windows.items()},
        "active_frac": [round(float(share), 4) for share in frequency.mean(axis=1)],
    }
    report: dict[str, Any] = {**common, "window_tokens": int(test.ids.shape[1])}
    if result.chosen and result.equal and result.baseline:
        report["chosen"] = _choice(result.chosen)
        report["equal_share"] = {
            **_choice(result.equal),
            "losses": losses(result.dense, result.baseline, test),
        }
    report["texts"] = {split: list(windows.used) for split, windows in result.windows.items()}
    return meta, report


def losses(dense: Measurement, other: Measurement, windows: Windows) -> dict[str, dict[str, float]]:
    """Return for each kind the dense and the thresholded loss, the rise, its error, and the active share."""
    found = rises(dense, other, windows)
    return {
        kind: {
            "dense": round(dense.loss(windows, kind), 4),
            "thresholded": round(other.loss(windows, kind), 4),
            "rise": round(rise, 4),
            "standard_error": round(error, 4),
            "active_frac": round(other.active_frac(kind), 4),
        }
        for kind, (rise, error) in found.items()
    }


def table(report: dict[str, Any]) -> str:
    """Return the losses on the test split as lines of text, nats per token."""
    equal = report.get("equal_share", {}).get("losses")
    rows: list[list[str]] = [list(_COLUMNS if equal else _COLUMNS[:5])]
    for kind in (kind for kind in KINDS if kind in report["losses"]):
        row = report["losses"][kind]
        cells = [kind, f"{row['dense']:.3f}", f"{row['thresholded']:.3f}", *_rise(row)]
        rows.append(cells + (_rise(equal[kind]) if equal else []))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    limit = report["max_loss"]
    if "chosen" not in report:
        return "\n".join(
            [*lines, f"activation {report['activation']} is sparse by itself: thresholds not searched"]
        )
    if limit is None:
        return "\n".join([*lines, f"layer budgets for the asked share; {report['seconds']:.0f} s"])
    over = [kind for kind, row in report["losses"].items() if row["rise"] > limit]
    verdict = (
        f"over the limit of {limit} on: {', '.join(over)}" if over else f"within {limit} nats on each kind"
    )
    return "\n".join([*lines, f"test text: {verdict}; {report['seconds']:.0f} s"])


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write ``report.json``."""
    text = json.dumps(report, indent=1, ensure_ascii=False)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")


def _rise(row: dict[str, float]) -> list[str]:
    return [f"{row['rise']:+.3f} +- {row['standard_error']:.3f}", f"{100 * row['active_frac']:.1f} %"]


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "dropped_share": [round(float(share), 3) for share in choice.shares],
        "tried": [{"dropped_share": round(s, 4), "worst_rise": round(rise, 4)} for s, rise in choice.tried],
    }


def _command(options: argparse.Namespace) -> str:
    words = ["kairox sparsify", shlex.quote(Path(options.model).name)]
    words.append(
        f"--max-loss {options.max_loss:g}"
        if options.active_frac is None
        else f"--active-frac {options.active_frac:g}"
    )
    words += [f"--windows {options.windows} --window {options.window} --batch {options.batch}"]
    if options.text:
        words += ["--text", *(shlex.quote(path.name) for path in options.text)]
    if options.text_only:
        words.append("--text-only")
    return " ".join(words)


def installed_versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    packages = ("kairox-jax", "jax", "jaxlib", "flax", "numpy", "tokenizers")
    return {"python": platform.python_version(), "machine": platform.machine(), **_installed(packages)}


def _installed(packages: tuple[str, ...]) -> dict[str, str]:
    result = {}
    for package in packages:
        try:
            result[package] = version(package)
        except PackageNotFoundError:  # the project itself, run from its source folder
            continue
    return result
