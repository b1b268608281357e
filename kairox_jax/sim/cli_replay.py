"""``kairox replay``: arguments, and what is printed."""

from __future__ import annotations

import argparse
import json
import sys

from kairox_jax.balancing import POLICIES
from kairox_jax.io.grouping import load_grouping
from kairox_jax.io.trace import read_trace
from kairox_jax.sim.compare import parse_param
from kairox_jax.sim.groups import reorder, reorder_prior
from kairox_jax.sim.machine import profile_names
from kairox_jax.sim.models import DTYPE_BYTES, MODELS
from kairox_jax.sim.priors import check_same_model, choose_priors
from kairox_jax.sim.replay import ReplaySettings, replay


def parse_capacity(text: str) -> int | float:
    """Return a whole number of slots, or, where there is a point or exponent, a share."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number: give slots (500) or a share (0.25)"
        ) from None


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what replay and compare share."""
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="trace files (.npz) of one model")
    parser.add_argument("--as-model", choices=sorted(MODELS), help="replay at this model's scale")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPE_BYTES), help="of the model's weights; f16 where not given"
    )
    parser.add_argument("--group-size", type=int, default=1, metavar="G", help="neurons that move together")
    parser.add_argument("--steps", type=int, metavar="N", help="replay the first N steps of each trace only")
    parser.add_argument(
        "--copies",
        choices=("staged", "per-record"),
        default="staged",
        help="one copy call for a plan, or one for each record",
    )
    parser.add_argument(
        "--queue-ms", type=float, default=4.0, metavar="MS", help="transfers that may wait for the link"
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="late records always go to the host, as in the live pipeline"
    )


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``kairox replay``."""
    add_model_arguments(parser)
    parser.add_argument("--policy", default="guide", choices=sorted(POLICIES))
    parser.add_argument("--param", action="append", default=[], metavar="NAME=VALUE", help="of the policy")
    parser.add_argument(
        "--hardware", default="guide", help=f"guide, {', '.join(profile_names())}, or the path of a profile"
    )
    parser.add_argument(
        "--capacity", type=parse_capacity, default=0.25, help="slots per layer (500), or a share (0.25)"
    )
    parser.add_argument("--prior", default="auto", help="a trace whose frequencies are the profile, or none")
    parser.add_argument("--grouping", metavar="FILE", help="groups of `kairox group` move together")
    parser.add_argument("--json", action="store_true", help="print every step and the totals as JSON")
    parser.add_argument("--check", action="store_true", help="check every plan of the policy")


def chosen_dtype(args: argparse.Namespace, hardware: list[str]) -> str:
    """Return the dtype of the weights.

    Raises:
        ValueError: one was given, but the guide's cost model has no weights.
    """
    if args.dtype is not None and "guide" in hardware:
        raise ValueError("--dtype has no effect with --hardware guide, which has its own times: leave it out")
    return args.dtype or ReplaySettings.dtype


def run_replay(args: argparse.Namespace) -> int:
    """Replay and print; return the exit status.

    Raises:
        ValueError: arguments or traces that do not fit.
    """
    traces = [read_trace(path) for path in args.traces]
    check_same_model(traces)
    priors, prior_note = choose_priors(traces, args.prior)
    if args.grouping is not None:
        grouping = load_grouping(args.grouping)
        if args.group_size not in (1, grouping.group_size):
            raise ValueError(
                f"--group-size {args.group_size} is not that of {args.grouping}, {grouping.group_size}: leave it out"
            )
        args.group_size = grouping.group_size
        traces = [reorder(trace, grouping) for trace in traces]
        priors = [reorder_prior(prior, grouping) for prior in priors]
    settings = ReplaySettings(
        policy=args.policy,
        params=dict(parse_param(text) for text in args.param),
        hardware=args.hardware,
        capacity=args.capacity,
        group_size=args.group_size,
        as_model=args.as_model,
        dtype=chosen_dtype(args, [args.hardware]),
        copies=args.copies,
        queue_ms=args.queue_ms,
        can_wait=not args.no_wait,
        steps=args.steps,
        debug=args.check,
    )
    result = replay(traces, settings, priors)
    if args.json:
        note = {"policy": args.policy, "hardware": args.hardware, "prior": prior_note}
        json.dump({**result.as_json(), **note}, sys.stdout)
        print()
        return 0
    print(f"{args.policy} on {args.hardware}, {result.scale}\n{prior_note}", file=sys.stderr)
    for name, value in result.totals().items():
        print(f"{name:22} {value:,.4f}" if isinstance(value, float) else f"{name:22} {value:,}")
    return 0
