"""Comparison: policies x hardware x capacity over the same traces, with what each cell cost and earned."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kairox_jax.balancing import make_policy
from kairox_jax.io.trace import Trace
from kairox_jax.sim.replay import ReplaySettings, Result, replay

LOAD_PRICE = 1.5  # hits that a load must earn back, for "net"
CLAIRVOYANT = ("oracle",)


@dataclass(frozen=True)
class Cell:
    """One policy on one machine at one capacity."""

    label: str
    hardware: str
    capacity: int | float
    totals: dict[str, Any]
    result: Result


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and parameters of ``name`` or ``name:key=value:key=value``.

    Raises:
        ValueError: a part without an equals sign.
    """
    name, *params = text.split(":")
    return name, dict(parse_param(param) for param in params)


def parse_param(text: str) -> tuple[str, Any]:
    """Return the two sides of ``name=value``; a value that is JSON (a number, true) is read as such.

    Raises:
        ValueError: no equals sign.
    """
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ValueError(f"{text!r}: expected name=value, such as beta=0.9")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def check_policies(labels: list[str]) -> None:
    """Make each policy once, so that a wrong name or parameter is told before anything runs.

    Raises:
        ValueError: no such policy, or a parameter that it does not take.
    """
    for label in labels:
        name, params = parse_policy(label)
        make_policy(name, **({"future": lambda step: None} if name in CLAIRVOYANT else {}), **params)


def compare(
    traces: list[Trace],
    priors: list[np.ndarray | None],
    base: ReplaySettings,
    policies: list[str],
    hardware: list[str],
    capacities: list[int | float],
    done: Callable[[str], None] = lambda cell: None,
) -> list[Cell]:
    """Replay every combination.

    Args:
        traces, priors: as for ``replay``.
        base: everything but policy, hardware and capacity.
        policies: names, with parameters behind colons.
        hardware: profile names.
        capacities: as in ``ReplaySettings``.
        done: is told each cell that has run.
    """
    cells = []
    for machine in hardware:
        for capacity in capacities:
            for label in policies:
                name, params = parse_policy(label)
                settings = replace(base, policy=name, params=params, hardware=machine, capacity=capacity)
                result = replay(traces, settings, priors)
                totals = result.totals()
                active = sum(record.active for record in result.records)
                loads = totals["promotions"] * base.group_size
                totals["net"] = totals["hit_rate"] - LOAD_PRICE * loads / max(active, 1)
                cells.append(Cell(label, machine, capacity, totals, result))
                done(f"{machine} {capacity} {label}")
    return cells


def best_causal(cells: list[Cell], hardware: str, capacity: int | float) -> Cell:
    """Return the causal policy with the least time a token in one column."""
    column = [
        cell
        for cell in cells
        if (cell.hardware, cell.capacity) == (hardware, capacity) and cell.label not in CLAIRVOYANT
    ]
    return min(column, key=lambda cell: cell.totals["ms_per_token"])


def speedups(cells: list[Cell], label: str) -> dict[str, float]:
    """Return how many times less time ``label`` takes than each other policy, in geometric mean."""
    columns: dict[str, dict[tuple, float]] = {}
    for cell in cells:
        columns.setdefault(cell.label, {})[(cell.hardware, cell.capacity)] = cell.totals["ms_per_token"]
    if label not in columns:
        return {}
    own = columns[label]
    return {
        other: math.exp(float(np.mean([math.log(times[key] / own[key]) for key in own])))
        for other, times in columns.items()
        if other != label
    }


def table(cells: list[Cell]) -> str:
    """Return a text table: a row per policy, a column per machine and capacity; the best causal marked."""
    keys = list(dict.fromkeys((cell.hardware, cell.capacity) for cell in cells))
    labels = list(dict.fromkeys(cell.label for cell in cells))
    found = {(cell.label, cell.hardware, cell.capacity): cell for cell in cells}
    width = max(len(label) for label in labels) + 2
    lines = ["ms a token (p99) hit rate; * = least of the causal policies", " " * width]
    lines[1] += "".join(f"{f'{hardware} {capacity}':>28}" for hardware, capacity in keys)
    best = {key: best_causal(cells, *key).label for key in keys}
    for label in labels:
        line = label.ljust(width)
        for key in keys:
            total = found[(label, *key)].totals
            mark = "*" if best[key] == label else " "
            text = f"{total['ms_per_token']:.2f}{mark}({total['p99_ms']:.1f}) {100 * total['hit_rate']:.1f}%"
            line += f"{text:>28}"
        lines.append(line)
    return "\n".join(lines)


def as_json(cells: list[Cell]) -> list[dict[str, Any]]:
    """Return one object per cell."""
    return [
        {"policy": cell.label, "hardware": cell.hardware, "capacity": cell.capacity, **cell.totals}
        for cell in cells
    ]
