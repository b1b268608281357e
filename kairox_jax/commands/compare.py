"""``kairox compare``: arguments, and what is printed and written."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from kairox_jax.commands.flags import Flag
from kairox_jax.commands.replay import MODEL_FLAGS, chosen_dtype, parse_capacity
from kairox_jax.io.trace import read_trace
from kairox_jax.sim.compare import as_json, check_policies, compare, speedups, table
from kairox_jax.sim.machine import load_machine, profile_names
from kairox_jax.sim.plots import plot_all
from kairox_jax.sim.priors import check_same_model, profiled, topic_switches
from kairox_jax.sim.replay import ReplaySettings


def words(text: str) -> tuple[str, ...]:
    """Return the words between commas."""
    return tuple(text.split(","))


DEFAULT_POLICIES = (
    "layers,static,guide,paper,paper:tau_filter=literal,paper-artifact,eager,eager-lambda0,"
    "current,current-freq,dynamic,lru,lfu,split,oracle"
)


COMPARE_FLAGS = (
    Flag(
        dest="policies",
        names=("--policies",),
        metavar="LIST",
        convert=words,
        default=tuple(DEFAULT_POLICIES.split(",")),
        help="comma-separated; parameters as name:key=value:key=value",
    ),
    Flag(
        dest="hardware",
        names=("--hardware",),
        metavar="LIST",
        convert=words,
        default=("pc-low", "pc-high", "rtx4070-pcie4", "rtx3060-pcie3"),
        help=f"comma-separated: guide, {', '.join(profile_names())}, or paths",
    ),
    Flag(
        dest="capacity",
        names=("--capacity",),
        metavar="LIST",
        convert=lambda text: tuple(parse_capacity(word) for word in words(text)),
        default=(0.25, 0.4),
        help="comma-separated slots per layer, or shares",
    ),
    Flag(
        dest="topic_switch",
        names=("--topic-switch",),
        help="let each text go over into the next in the middle, with the first one's profile",
    ),
    Flag(dest="json", names=("--json",), help="print JSON instead of a table"),
    Flag(
        dest="out",
        names=("--out",),
        metavar="DIR",
        convert=Path,
        help="write compare.json and table.txt there",
    ),
    Flag(dest="quiet", names=("--quiet",), help="no progress on standard error"),
    Flag(dest="plots", names=("--plots",), help="draw plots into DIR (needs matplotlib)"),
)
FLAGS = {"compare": COMPARE_FLAGS, "scale and executor": MODEL_FLAGS}


def run_compare(args: argparse.Namespace) -> int:
    """Compare, print and write; return the exit status.

    Raises:
        ValueError: arguments or traces that do not fit.
    """
    out: Path | None = args.out
    if args.plots and out is None:
        raise ValueError("--plots needs --out DIR, the folder for the pictures")
    policies, hardware = list(args.policies), list(args.hardware)
    check_policies(policies)
    for name in hardware:
        if name != "guide":
            load_machine(name)
    if out is not None:
        out.mkdir(
            parents=True, exist_ok=True
        )  # an hour of replays must not end at a folder that cannot be made
    traces = [read_trace(path) for path in args.traces]
    check_same_model(traces)
    traces, priors, prior_note = topic_switches(traces, args.steps) if args.topic_switch else profiled(traces)
    base = ReplaySettings(
        policy="split",
        hardware=hardware[0],
        group_size=args.group_size,
        as_model=args.as_model,
        dtype=chosen_dtype(args, hardware),
        copies=args.copies,
        queue_ms=args.queue_ms,
        can_wait=not args.no_wait,
        forecast=args.forecast,
        max_moves=args.max_moves,
        steps=args.steps,
    )
    for name in hardware:
        replace(base, hardware=name)  # what does not go with one of them is told before the others run
    total = len(policies) * len(hardware) * len(args.capacity)
    with tqdm(total=total, desc="compare", unit="replay", file=sys.stderr, disable=bool(args.quiet)) as bar:

        def tell(cell: str) -> None:
            bar.set_postfix_str(cell)
            bar.update()

        cells = compare(traces, priors, base, policies, hardware, list(args.capacity), tell)
    summary = {
        "traces": [trace.name for trace in traces],
        "prior": prior_note,
        "scale": cells[0].result.scale,
        "cells": as_json(cells),
        "split_is_faster_by": speedups(cells, "split"),
    }
    lines = [table(cells), "", summary["scale"], prior_note]
    if summary["split_is_faster_by"]:
        ratios = ", ".join(f"{name} {value:.2f}x" for name, value in summary["split_is_faster_by"].items())
        lines.append(f"split takes less time than (geometric mean): {ratios}")
    print(json.dumps(summary) if args.json else "\n".join(lines))
    if out is not None:
        (out / "compare.json").write_text(json.dumps(summary, indent=1) + "\n")
        (out / "table.txt").write_text("\n".join(lines) + "\n")
        if args.plots:
            plot_all(cells, traces, out)
    return 0
