"""``kairox compare``: arguments, and what is printed and written."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kairox_jax.io.trace import read_trace
from kairox_jax.sim.cli_replay import add_model_arguments, chosen_dtype, parse_capacity
from kairox_jax.sim.compare import as_json, check_policies, compare, speedups, table
from kairox_jax.sim.machine import load_machine, profile_names
from kairox_jax.sim.plots import plot_all
from kairox_jax.sim.priors import check_same_model, profiled
from kairox_jax.sim.replay import ReplaySettings

DEFAULT_POLICIES = (
    "layers,static,guide,paper,paper:tau_filter=literal,paper-artifact,eager,eager-lambda0,"
    "current,current-freq,dynamic,lru,lfu,split,oracle"
)


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``kairox compare``."""
    add_model_arguments(parser)
    parser.add_argument(
        "--policies", default=DEFAULT_POLICIES, help="comma-separated; parameters as name:key=value:key=value"
    )
    parser.add_argument(
        "--hardware",
        default="pc-low,pc-high,rtx4070-pcie4,rtx3060-pcie3",
        help=f"comma-separated: guide, {', '.join(profile_names())}, or paths",
    )
    parser.add_argument("--capacity", default="0.25,0.4", help="comma-separated slots per layer, or shares")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write compare.json and table.txt there")
    parser.add_argument("--plots", action="store_true", help="draw plots into DIR (needs matplotlib)")


def run_compare(args: argparse.Namespace) -> int:
    """Compare, print and write; return the exit status.

    Raises:
        ValueError: arguments or traces that do not fit.
    """
    out: Path | None = args.out
    if args.plots and out is None:
        raise ValueError("--plots needs --out DIR, the folder for the pictures")
    policies, hardware = args.policies.split(","), args.hardware.split(",")
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
    traces, priors, prior_note = profiled(traces)
    try:
        capacities = [parse_capacity(text) for text in args.capacity.split(",")]
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--capacity: {error}") from None
    base = ReplaySettings(
        policy="split",
        group_size=args.group_size,
        as_model=args.as_model,
        dtype=chosen_dtype(args, hardware),
        copies=args.copies,
        queue_ms=args.queue_ms,
        can_wait=not args.no_wait,
        steps=args.steps,
    )
    cells = compare(
        traces,
        priors,
        base,
        policies,
        hardware,
        capacities,
        lambda text: print(text, file=sys.stderr),
    )
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
