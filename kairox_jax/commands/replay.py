"""``kairox replay``: arguments, and what is printed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable

from kairox_jax.balancing import POLICIES
from kairox_jax.commands.flags import Flag, number, positive_number
from kairox_jax.io.grouping import load_grouping
from kairox_jax.io.trace import read_trace
from kairox_jax.sim.compare import parse_param
from kairox_jax.sim.groups import reorder, reorder_prior
from kairox_jax.sim.machine import profile_names
from kairox_jax.sim.models import DTYPE_BYTES, MODELS
from kairox_jax.sim.priors import check_same_model, choose_priors
from kairox_jax.sim.replay import FORECASTS, ReplaySettings, replay


def parse_capacity(text: str) -> int | float:
    """Return a whole number of slots, or, where there is a point or exponent, a share.

    Raises:
        ValueError: no number.
    """
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number: give slots (500) or a share (0.25)") from None


def one_of(choices: Iterable[str]) -> Callable[[str], str]:
    """Return a conversion that lets only these texts pass."""
    known = sorted(choices)

    def convert(text: str) -> str:
        if text not in known:
            raise ValueError(f"{text!r} is unknown: choose one of {', '.join(known)}")
        return text

    return convert


COPIES = ("staged", "per-record")
MODEL_FLAGS = (
    Flag(
        dest="as_model",
        names=("--as-model",),
        metavar="MODEL",
        convert=one_of(MODELS),
        help=f"replay at this model's scale: {', '.join(sorted(MODELS))}; the model of the trace where not given",
    ),
    Flag(
        dest="dtype",
        names=("--dtype",),
        metavar="|".join(DTYPE_BYTES),
        convert=one_of(DTYPE_BYTES),
        help="of the model's weights; f16 where not given",
    ),
    Flag(
        dest="group_size",
        names=("--group-size",),
        metavar="G",
        convert=positive_number,
        default=ReplaySettings.group_size,
        help="neurons that move together",
    ),
    Flag(
        dest="steps",
        names=("--steps",),
        metavar="N",
        convert=positive_number,
        help="replay the first N steps of each trace only; all where not given",
    ),
    Flag(
        dest="copies",
        names=("--copies",),
        metavar="|".join(COPIES),
        convert=one_of(COPIES),
        default=ReplaySettings.copies,
        help="one copy call for a plan, or one for each record",
    ),
    Flag(
        dest="queue_ms",
        names=("--queue-ms",),
        metavar="MS",
        convert=number,
        default=ReplaySettings.queue_ms,
        help="transfers that may wait for the link",
    ),
    Flag(
        dest="no_wait",
        names=("--no-wait",),
        help="late records always go to the host, as in the live pipeline",
    ),
    Flag(
        dest="forecast",
        names=("--forecast",),
        metavar="|".join(FORECASTS),
        convert=one_of(FORECASTS),
        default=ReplaySettings.forecast,
        help="what plans know: perfect, a layer ahead what it will compute; adjacent and previous, what the engine "
        "knows with predictors and without",
    ),
    Flag(
        dest="max_moves",
        names=("--max-moves",),
        metavar="N",
        convert=positive_number,
        help="records that one plan may load (the engine's bound is 64); as the queue allows where not given",
    ),
)
REPLAY_FLAGS = (
    Flag(
        dest="policy",
        names=("--policy",),
        metavar="NAME",
        convert=one_of(POLICIES),
        default="guide",
        help=f"one of {', '.join(sorted(POLICIES))}",
    ),
    Flag(
        dest="param",
        names=("--param",),
        metavar="NAME=VALUE",
        convert=parse_param,
        repeat=True,
        default=(),
        help="of the policy; may be given several times",
    ),
    Flag(
        dest="hardware",
        names=("--hardware",),
        metavar="NAME",
        default=ReplaySettings.hardware,
        help=f"guide, {', '.join(profile_names())}, or the path of a profile",
    ),
    Flag(
        dest="capacity",
        names=("--capacity",),
        metavar="C",
        convert=parse_capacity,
        default=ReplaySettings.capacity,
        help="slots per layer (500), or a share (0.25)",
    ),
    Flag(
        dest="prior",
        names=("--prior",),
        metavar="FILE",
        default="auto",
        help="the activation profile: a file of `kairox profile`, a trace, none, or auto (the other traces)",
    ),
    Flag(
        dest="grouping",
        names=("--grouping",),
        metavar="FILE",
        help="groups of `kairox group` move together",
    ),
    Flag(dest="json", names=("--json",), help="print every step and the totals as JSON"),
    Flag(dest="check", names=("--check",), help="check every plan of the policy"),
)
FLAGS = {"replay": REPLAY_FLAGS, "scale and executor": MODEL_FLAGS}


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
    if (
        args.policy == "guide"
        and not dict(args.param).get("warm_start")
        and any(p is not None for p in priors)
    ):
        prior_note += "; guide starts neutral all the same, unless --param warm_start=true"
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
        params=dict(args.param),
        hardware=args.hardware,
        capacity=args.capacity,
        group_size=args.group_size,
        as_model=args.as_model,
        dtype=chosen_dtype(args, [args.hardware]),
        copies=args.copies,
        queue_ms=args.queue_ms,
        can_wait=not args.no_wait,
        forecast=args.forecast,
        max_moves=args.max_moves,
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
    totals = result.totals()
    if args.hardware == "guide":
        del totals["link_bytes"]  # its link costs time for each record, whatever its size
    for name, value in totals.items():
        print(f"{name:22} {value:,.4f}" if isinstance(value, float) else f"{name:22} {value:,}")
    return 0
