"""`kairox group`: groups of neurons from a profile or traces, with their cohesion, as one file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from kairox_jax.io import fingerprint, open_checkpoint
from kairox_jax.io.grouping import Grouping, check_group_size, save_grouping
from kairox_jax.io.profile import check_fingerprint, load_profile
from kairox_jax.io.trace import read_trace
from training.coactivation import layer_sets
from training.grouping import Cohesion, group_layers, require_metis


def run(options: argparse.Namespace) -> int:
    """Run the command; print cohesion by layer.

    Args:
        options: source (profile or trace), out, group_size, model, tokens, json.

    Raises:
        ValueError: a size that does not divide F, a source without active sets, or of another model.
    """
    packed, neurons, meta = _read(options.source)
    check_group_size(options.group_size, neurons)
    if options.model is not None:
        check_fingerprint(meta, fingerprint(open_checkpoint(options.model)), str(options.source))
    if len(packed) > options.tokens:  # spread over the whole source
        packed = packed[np.linspace(0, len(packed) - 1, options.tokens).astype(int)]
    layers = packed.shape[1]
    require_metis()

    def sets_of(layer: int) -> np.ndarray:
        return layer_sets(packed, layer, neurons)

    with tqdm(total=layers, desc="group", unit="layer", file=sys.stderr) as bar:
        order, found = group_layers(sets_of, layers, options.group_size, done=bar.update)
    report = describe(found, options, meta, len(packed))
    save_grouping(options.out, Grouping(permutation=order, group_size=options.group_size, meta=report))
    print(json.dumps(report) if options.json else "\n".join(table(found, options.group_size)))
    return 0


def _read(source: str) -> tuple[np.ndarray, int, dict[str, Any]]:
    """Read active sets [R, L, ceil(F / 8)] from a profile or a trace."""
    try:
        with np.load(source, allow_pickle=False) as file:
            names = set(file.files)
    except OSError as error:
        raise ValueError(
            f"cannot read {source}: {error.strerror or error}; give a profile or a trace"
        ) from None
    except (ValueError, EOFError):
        names = set[str]()
    if "active" in names:
        trace = read_trace(source)
        return trace.packed, trace.num_neurons, trace.meta
    if "frequency" not in names:
        raise ValueError(f"{source} is neither a profile nor a trace: make one with `kairox profile`")
    profile = load_profile(source)
    if profile.sample is None:
        raise ValueError(
            f"{source} holds frequencies without active sets: profile the model over text, `kairox profile MODEL TEXT`"
        )
    return profile.sample, profile.num_neurons, profile.meta


def describe(
    found: list[Cohesion], options: argparse.Namespace, meta: dict[str, Any], tokens: int
) -> dict[str, Any]:
    """Return the report: facts of the source, cohesion of each layer and over all."""
    return {
        "model": meta.get("model"),
        "fingerprint": meta.get("fingerprint"),
        "source": Path(options.source).name,
        "tokens": tokens,
        "group_size": options.group_size,
        "over_random": round(_ratio(found, lambda c: c.grouped), 4),
        "layers": [{name: round(value, 6) for name, value in asdict(cohesion).items()} for cohesion in found],
    }


def _ratio(found: list[Cohesion], part: Callable[[Cohesion], float]) -> float:
    """Return a cohesion over that of random groups: the mean of the layers' ratios."""
    return float(np.mean([part(c) / max(c.random, 1e-30) for c in found]))


def table(found: list[Cohesion], size: int) -> list[str]:
    """Return cohesion over random groups as lines, measured on tokens that the groups were not made from."""
    lines = [
        f"groups of {size}: share of tokens at which two neurons of a group are both active, over random groups",
        "layer  random  by frequency  METIS  grouped  beyond chance: random, grouped",
    ]
    for layer, c in enumerate(found):
        over = [value / max(c.random, 1e-30) for value in (c.frequency, c.metis, c.grouped)]
        lines.append(
            f"{layer:5}  {c.random:6.4f}  {over[0]:11.2f}x  {over[1]:4.2f}x  {over[2]:6.2f}x  "
            f"{c.beyond_random:21.5f}  {c.beyond_grouped:.5f}"
        )
    parts = (lambda c: c.frequency, lambda c: c.metis, lambda c: c.grouped)
    means = [_ratio(found, part) for part in parts]
    lines.append(f" mean          {means[0]:11.2f}x  {means[1]:4.2f}x  {means[2]:6.2f}x")
    return lines
