"""Put neurons that are active together into groups of one size: METIS, made exactly balanced, then swaps.

Two starts compete in each layer: METIS on the graph of every neuron's best partners, and METIS within strata of
equal frequency. Nothing here holds F x F numbers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from kairox_jax.io.grouping import check_group_size
from training.coactivation import top_partners
from training.grouping_swaps import improve

PARTNERS = 32  # edges that each neuron brings into the graph
STRATUM_GROUPS = 6  # on the default model 6 did better than 3, 12 and 24
WEIGHT_SCALE = 10_000  # METIS takes whole numbers


@dataclass(frozen=True)
class Cohesion:
    """Mean share of tokens at which two neurons of a group are both active.

    Attributes:
        random, frequency: of random groups, and of neurons sorted by frequency.
        metis: of METIS's parts, made balanced.
        grouped: of the groups after swaps.
        beyond_random, beyond_grouped: mean of what exceeds the product of the two frequencies.
    """

    random: float
    frequency: float
    metis: float
    grouped: float
    beyond_random: float
    beyond_grouped: float


def group_layer(
    fit: Bool[np.ndarray, "R F"], size: int, *, swap_rounds: int = 60
) -> tuple[Int[np.ndarray, "n size"], Int[np.ndarray, "n size"]]:
    """Group one layer's neurons.

    Args:
        fit: active sets of R tokens.
        size: neurons of a group; divides F.
        swap_rounds: the most rounds of swaps.

    Returns:
        The groups, hottest first, and METIS's own (made balanced) for comparison.

    Raises:
        ValueError: a size that does not divide F, or pymetis is not installed.
    """
    check_group_size(size, fit.shape[1])
    frequency = fit.mean(axis=0)
    starts = [_whole_graph(fit, size), _by_strata(fit, size, frequency)]
    metis = max(starts, key=lambda groups: cohesion(fit, groups))
    if fit.shape[1] // size == 1:
        return starts[0], starts[0]
    found = [improve(fit, groups, rounds=swap_rounds) for groups in starts]
    best = max(found, key=lambda groups: cohesion(fit, groups))
    inside = np.argsort(-frequency[best], axis=1, kind="stable")
    best = np.take_along_axis(best, inside, axis=1)
    return best[np.argsort(-frequency[best].mean(axis=1), kind="stable")], metis


def cohesion(active: Bool[np.ndarray, "R F"], groups: Int[np.ndarray, "n size"]) -> float:
    """Return the mean share of tokens at which two neurons of a group are both active."""
    size = groups.shape[1]
    counts = np.add.reduceat(
        active[:, groups.ravel()], np.arange(0, groups.size, size), axis=1, dtype=np.int32
    )
    pairs = counts.astype(np.int64) * (counts - 1)
    return float(pairs.sum() / (len(active) * len(groups) * size * (size - 1)))


def measure(
    fit: Bool[np.ndarray, "R F"],
    held_out: Bool[np.ndarray, "S F"],
    groups: Int[np.ndarray, "n size"],
    metis: Int[np.ndarray, "n size"],
    seed: int = 0,
) -> Cohesion:
    """Measure groups on tokens that they were not made from, beside random groups and sorting by frequency."""
    rng = np.random.default_rng(seed)
    neurons, size = fit.shape[1], groups.shape[1]
    draws = [rng.permutation(neurons).reshape(-1, size) for _ in range(8)]
    by_frequency = np.argsort(-fit.mean(axis=0), kind="stable").reshape(-1, size)
    chance = [_chance(held_out, draw) for draw in draws]
    random = [cohesion(held_out, draw) for draw in draws]
    grouped = cohesion(held_out, groups)
    return Cohesion(
        random=float(np.mean(random)),
        frequency=cohesion(held_out, by_frequency),
        metis=cohesion(held_out, metis),
        grouped=grouped,
        beyond_random=float(np.mean(np.subtract(random, chance))),
        beyond_grouped=grouped - _chance(held_out, groups),
    )


def _chance(active: np.ndarray, groups: np.ndarray) -> float:
    """Return what cohesion would be if neurons were independent."""
    frequency = active.mean(axis=0)[groups]
    size = groups.shape[1]
    pairs = np.square(frequency.sum(axis=1)) - np.square(frequency).sum(axis=1)
    return float(pairs.mean() / (size * (size - 1)))


def _whole_graph(fit: np.ndarray, size: int) -> np.ndarray:
    """Partition the graph of best partners beyond chance."""
    neurons = fit.shape[1]
    partners, weights = top_partners(fit, min(PARTNERS, neurons - 1), beyond_chance=True)
    sources = np.repeat(np.arange(neurons), partners.shape[1])
    return partition(sources, partners.ravel(), weights.ravel(), neurons, size)


def _by_strata(fit: np.ndarray, size: int, frequency: np.ndarray) -> np.ndarray:
    """Partition within runs of neurons of similar frequency."""
    order = np.argsort(-frequency, kind="stable")
    step, found = STRATUM_GROUPS * size, []
    for first in range(0, len(order), step):
        some = order[first : first + step]
        if len(some) == size:
            found.append(some[None])
            continue
        partners, weights = top_partners(fit[:, some], min(PARTNERS, len(some) - 1), beyond_chance=True)
        sources = np.repeat(np.arange(len(some)), partners.shape[1])
        found.append(some[partition(sources, partners.ravel(), weights.ravel(), len(some), size)])
    return np.concatenate(found)


def partition(
    sources: Int[np.ndarray, " E"],
    targets: Int[np.ndarray, " E"],
    weights: Float[np.ndarray, " E"],
    num_neurons: int,
    size: int,
) -> Int[np.ndarray, "n size"]:
    """Cut a graph into groups of exactly ``size`` with METIS, keeping heavy edges inside.

    Args:
        sources, targets: ends of the edges; either direction, duplicates allowed.
        weights: of the edges; those not above zero are left out.
        num_neurons: vertices.
        size: of a group; divides ``num_neurons``.

    Raises:
        ValueError: pymetis is not installed.
    """
    low, high = np.minimum(sources, targets), np.maximum(sources, targets)
    keys = low.astype(np.int64) * num_neurons + high
    _, first = np.unique(keys, return_index=True)
    first = first[weights[first] > 0]
    low, high, weights = low[first], high[first], weights[first]
    scale = WEIGHT_SCALE / max(float(weights.max(initial=0)), 1e-30)
    whole = np.maximum((weights * scale).astype(np.int64), 1)
    ends, others = np.concatenate([low, high]), np.concatenate([high, low])
    order = np.argsort(ends, kind="stable")
    both = np.concatenate([whole, whole])[order]
    starts = np.searchsorted(ends[order], np.arange(num_neurons + 1))
    metis = require_metis()
    graph = metis.CSRAdjacency(starts.tolist(), others[order].tolist())
    _, parts = metis.part_graph(num_neurons // size, graph, eweights=both.tolist())
    return balance(np.asarray(parts), low, high, whole, size)


def balance(
    parts: Int[np.ndarray, " F"],
    low: Int[np.ndarray, " E"],
    high: Int[np.ndarray, " E"],
    weights: Int[np.ndarray, " E"],
    size: int,
) -> Int[np.ndarray, "n size"]:
    """Make every part exactly ``size``: parts that are too large give away what holds to them least.

    Args:
        parts: part of each neuron.
        low, high, weights: edges, each once.
        size: of a group.
    """
    count = len(parts) // size
    inside = parts[low] == parts[high]
    hold = np.bincount(low[inside], weights[inside], minlength=len(parts))
    hold += np.bincount(high[inside], weights[inside], minlength=len(parts))
    parts, loose = parts.copy(), []
    for part in range(count):
        members = np.flatnonzero(parts == part)
        if len(members) > size:
            loose += members[np.argsort(-hold[members], kind="stable")[size:]].tolist()
    parts[loose] = -1
    room = size - np.bincount(parts[parts >= 0], minlength=count)
    neighbours = _neighbours(loose, low, high, weights)
    for neuron in loose:
        pull = np.zeros(count)
        others, weight = neighbours[neuron]
        known = parts[others] >= 0
        np.add.at(pull, parts[others[known]], weight[known])
        best = int(np.argmax(np.where(room > 0, pull, -1)))
        parts[neuron], room[best] = best, room[best] - 1
    return np.argsort(parts, kind="stable").reshape(count, size)


def _neighbours(
    wanted: list[int], low: np.ndarray, high: np.ndarray, weights: np.ndarray
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    result = {}
    for neuron in wanted:
        as_low, as_high = low == neuron, high == neuron
        others = np.concatenate([high[as_low], low[as_high]])
        result[neuron] = others, np.concatenate([weights[as_low], weights[as_high]])
    return result


def require_metis() -> Any:
    """Return the module pymetis.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return import_module("pymetis")
    except ImportError:
        raise ValueError(
            "grouping needs METIS: pip install pymetis, or install kairox with the extra 'offline'"
        ) from None


def split_rows(rows: int, block: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Return row numbers to fit on and to measure on: every fourth block of neighbours is held out.

    Raises:
        ValueError: too few rows for both.
    """
    held_out = (np.arange(rows) // block) % 4 == 3
    if not held_out.any() or held_out.all():
        raise ValueError(f"{rows} tokens are too few to group by: give {4 * block} or more")
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


Progress = Callable[[int], object]


def group_layers(
    sets_of: Callable[[int], Bool[np.ndarray, "R F"]], num_layers: int, size: int, *, done: Progress
) -> tuple[Int[np.ndarray, "L F"], list[Cohesion]]:
    """Group every layer; see ``group_layer`` and ``measure``.

    Args:
        sets_of: a layer's active sets, all with the same number of tokens.
        num_layers: L.
        size: neurons of a group.
        done: called with 1 after each layer.
    """
    orders, found = [], []
    for layer in range(num_layers):
        active = sets_of(layer)
        fit, held_out = split_rows(len(active))
        groups, metis = group_layer(active[fit], size)
        orders.append(groups.ravel())
        found.append(measure(active[fit], active[held_out], groups, metis))
        done(1)
    return np.stack(orders), found
