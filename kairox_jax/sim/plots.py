"""Plots of a comparison; matplotlib is optional and asked for only here."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from kairox_jax.io.trace import Trace
from kairox_jax.sim.compare import Cell

PALETTE = ["#4C78A8", "#F58518", "#54A24B", "#B279A2", "#72B7B2", "#9D755D", "#BAB0AC"]
OURS = "#D62728"


def load_pyplot() -> Any:
    """Return ``matplotlib.pyplot`` on a canvas without a window.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import_module("matplotlib").use("Agg")
        return import_module("matplotlib.pyplot")
    except ImportError:
        raise ValueError("--plots needs matplotlib: pip install matplotlib") from None


def colour(label: str, index: int) -> str:
    """Return a policy's colour; ours stands out."""
    return OURS if label == "split" else "#333333" if label == "oracle" else PALETTE[index % len(PALETTE)]


def _save(plt: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def plot_bars(plt: Any, cells: list[Cell], field: str, title: str, path: Path) -> Path:
    """Draw one field as horizontal bars, a panel per machine and capacity."""
    keys = list(dict.fromkeys((cell.hardware, cell.capacity) for cell in cells))
    columns = min(len(keys), 4)
    rows = -(-len(keys) // columns)
    height = 1.4 + 0.25 * len({cell.label for cell in cells})
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.6 * columns, height * rows), squeeze=False, sharey=True
    )
    for axis in axes.flat[len(keys) :]:
        axis.set_visible(False)
    for axis, key in zip(axes.flat, keys, strict=False):
        column = [cell for cell in cells if (cell.hardware, cell.capacity) == key][::-1]
        values = [cell.totals[field] for cell in column]
        colours = [colour(cell.label, index) for index, cell in enumerate(column)]
        axis.barh([cell.label for cell in column], values, color=colours)
        for position, value in enumerate(values):
            axis.text(value, position, f" {value:.3g}", va="center", fontsize=7)
        axis.set_title(f"{key[0]}, capacity {key[1]}", fontsize=9)
        axis.margins(x=0.18)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    return _save(plt, figure, path)


def plot_sweep(plt: Any, cells: list[Cell], path: Path) -> Path:
    """Draw time a token over capacity, a panel per machine."""
    machines = list(dict.fromkeys(cell.hardware for cell in cells))
    figure, axes = plt.subplots(1, len(machines), figsize=(4 * len(machines), 3.4), squeeze=False)
    for axis, machine in zip(axes.flat, machines, strict=True):
        for index, label in enumerate(dict.fromkeys(cell.label for cell in cells)):
            line = [cell for cell in cells if (cell.hardware, cell.label) == (machine, label)]
            x, y = [cell.capacity for cell in line], [cell.totals["ms_per_token"] for cell in line]
            axis.plot(
                x, y, marker="o", color=colour(label, index), label=label, lw=2 if label == "split" else 1
            )
        axis.set(title=machine, xlabel="slots per layer (share)", ylabel="ms a token", ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[-1].legend(fontsize=7, frameon=False)
    return _save(plt, figure, path)


def plot_steps(plt: Any, cells: list[Cell], path: Path) -> Path:
    """Draw time, loads and hit rate of each step on the first machine and capacity, and lambda below."""
    first = (cells[0].hardware, cells[0].capacity)
    column = [cell for cell in cells if (cell.hardware, cell.capacity) == first]
    figure, axes = plt.subplots(4, 1, figsize=(9, 9), sharex=True)
    for index, cell in enumerate(column):
        records = cell.result.records
        rows = (
            [record.step_ms for record in records],
            [record.promoted / cell.result.num_layers for record in records],
            [record.hits / max(record.active, 1) for record in records],
            [record.report.get("lambda", np.nan) for record in records],
        )
        for axis, row in zip(axes, rows, strict=True):
            if not np.isnan(row).all():
                axis.plot(row, color=colour(cell.label, index), label=cell.label, lw=0.8)
    names = ("ms a token", "loads a layer", "hit rate", "lambda (paper)")
    for axis, name in zip(axes, names, strict=True):
        axis.set_ylabel(name)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_title(f"{first[0]}, capacity {first[1]}")
    axes[0].legend(fontsize=7, ncol=4, frameon=False)
    axes[-1].set_xlabel("step")
    return _save(plt, figure, path)


def plot_reactivation(plt: Any, trace: Trace, path: Path) -> Path:
    """Draw, for each layer, the probability that an active neuron is active again so many steps later."""
    distances = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233]
    distances = [distance for distance in distances if distance < trace.num_steps]
    active = np.stack([trace.active(step) for step in range(min(trace.num_steps, 400))])
    distances = [distance for distance in distances if distance < len(active)]
    rates = [
        (active[:-distance] & active[distance:]).sum((0, 2)) / np.maximum(active[:-distance].sum((0, 2)), 1)
        for distance in distances
    ]
    figure, axis = plt.subplots(figsize=(7, 4.5))
    image = axis.imshow(np.array(rates).T, aspect="auto", cmap="magma", origin="lower")
    axis.set_xticks(range(len(distances)), distances)
    axis.set(xlabel="steps later", ylabel="layer", title=f"reactivation, {trace.name}")
    figure.colorbar(image, label="P(active again)")
    return _save(plt, figure, path)


def plot_all(cells: list[Cell], traces: list[Trace], folder: Path) -> list[Path]:
    """Draw every plot of a comparison into ``folder`` and return the files."""
    plt = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    files = [
        plot_bars(plt, cells, "ms_per_token", "Time a token (ms)", folder / "time.png"),
        plot_bars(plt, cells, "hit_rate", "Hit rate", folder / "hit_rate.png"),
        plot_bars(plt, cells, "link_bytes", "Bytes over the link", folder / "link_bytes.png"),
        plot_steps(plt, cells, folder / "steps.png"),
        *(plot_reactivation(plt, trace, folder / f"reactivation-{trace.name}.png") for trace in traces),
    ]
    if len({cell.capacity for cell in cells}) > 1:
        files.append(plot_sweep(plt, cells, folder / "capacity.png"))
    return files
