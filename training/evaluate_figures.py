"""Figures of evaluation runs: means by kind and over all, bytes a token, and the table for the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from training.evaluate import Mode, Outcome
from training.statistics import standard_error
from training.texts import Windows


@dataclass(frozen=True, kw_only=True)
class RowSizes:
    """Bytes of a model's neurons; down rows count as the file's up rows do, in the file's own format.

    Attributes:
        row: of one row of D weights.
        rows: of a neuron: 3 gated, 2 not.
        first_rows: that exact mode reads of every neuron: gate, for SiLU also up.
        neurons: F.
        layers: L.
    """

    row: int
    rows: int
    first_rows: int
    neurons: int
    layers: int

    @property
    def dense(self) -> int:
        """Bytes of all neurons of all layers."""
        return self.row * self.rows * self.neurons * self.layers


def row_sizes(source: Any) -> RowSizes:
    """Return the sizes of a checkpoint's neurons."""
    config = source.config
    packed = source.packed("layers.0.w_up")
    return RowSizes(
        row=4 * config.d_model if packed is None else packed.data.shape[1],
        rows=3 if config.gated else 2,
        first_rows=2 if config.gated and config.activation in ("silu", "drelu") else 1,
        neurons=config.num_neurons,
        layers=config.num_layers,
    )


def bytes_per_token(mode: Mode, touched_frac: float, sizes: RowSizes) -> float:
    """Return the FFN and predictor bytes that a token reads."""
    if mode.rule == "active":
        first = sizes.first_rows / sizes.rows
        return sizes.dense * (first + (1 - first) * touched_frac)
    forecast = 0 if mode.predictors is None else mode.predictors.nbytes
    return sizes.dense * touched_frac + forecast


def mode_figures(
    mode: Mode, outcome: Outcome, dense: Outcome, windows: Windows, sizes: RowSizes
) -> dict[str, Any]:
    """Return a mode's figures over all windows, each token weighing the same, and the same ``by_kind``."""
    everything = np.arange(len(windows.ids))
    result = _figures(mode, outcome, dense, everything, windows, sizes)
    result["by_kind"] = {
        kind: _figures(mode, outcome, dense, windows.rows(kind), windows, sizes) for kind in windows.present()
    }
    return result


def _figures(
    mode: Mode, outcome: Outcome, dense: Outcome, rows: np.ndarray, windows: Windows, sizes: RowSizes
) -> dict[str, Any]:
    touched, active, hits, total, kept = outcome.counts[rows].sum(0)
    evaluated = len(rows) * windows.ids.shape[1] * sizes.neurons * sizes.layers
    losses = outcome.losses[rows].astype(np.float64)
    touched_frac = touched / evaluated
    result: dict[str, Any] = {
        "nats_per_token": _short(losses.mean()),
        "touched_frac": _short(touched_frac),
        "bytes_per_token": round(bytes_per_token(mode, touched_frac, sizes)),
    }
    if mode.rule == "dense":
        return result
    known = active >= 0
    error = standard_error(losses - dense.losses[rows])
    return result | {
        "rise": _short(losses.mean() - dense.losses[rows].mean(dtype=np.float64)),
        "rise_standard_error": _short(error) if np.isfinite(error) else None,
        "kl_to_dense": _short(outcome.divergence[rows].mean(dtype=np.float64)),
        "top1_agreement": _short(outcome.agreement[rows].mean(dtype=np.float64)),
        "active_frac": _short(active / evaluated) if known else None,
        "predicted_frac": _short(touched_frac),
        "recall": _short(hits / active) if known and active else None,
        "precision": _short(hits / touched) if known and touched else None,
        "recall_by_contribution": _short(kept / total) if total else None,
    }


def layer_figures(outcome: Outcome, windows: Windows, num_neurons: int) -> list[dict[str, Any]]:
    """Return share, recall and precision of each layer."""
    result = []
    for touched, active, hits, total, kept in outcome.layers:
        known = active > 0
        result.append(
            {
                "predicted_frac": _short(touched / windows.ids.size / num_neurons),
                "recall": _short(hits / active) if known else None,
                "precision": _short(hits / touched) if known and touched else None,
                "recall_by_contribution": _short(kept / total) if total else None,
            }
        )
    return result


def _short(value: float) -> float:
    return round(float(value), 5)


_COLUMNS = {
    "nats_per_token": "nats/token",
    "rise": "rise",
    "kl_to_dense": "KL",
    "top1_agreement": "top-1",
    "recall": "recall",
    "recall_by_contribution": "by contribution",
    "touched_frac": "touched",
    "bytes_per_token": "MB/token",
}


def figures_table(named: list[tuple[str, dict[str, Any]]]) -> str:
    """Return rows of figures as lines of text: a row for each mode and kind."""
    rows = [["mode", "text", *_COLUMNS.values()]]
    for name, figures in named:
        kinds = figures.get("by_kind", {})
        entries = {**kinds, "all": figures} if len(kinds) != 1 else kinds
        for kind, entry in entries.items():
            rows.append([name, kind, *(_cell(key, entry.get(key)) for key in _COLUMNS)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i < 2 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key == "bytes_per_token":
        return f"{value / 1e6:.2f}"
    if key in ("touched_frac", "recall", "recall_by_contribution", "top1_agreement"):
        return f"{100 * value:.1f} %"
    return f"{value:+.4f}" if key == "rise" else f"{value:.4f}"
