"""`kairox sparsify`: thresholds that make a model sparse, or a ReLU model distilled from it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kairox_jax.commands.flags import Flag, UsageError, add_flags, number, positive_number, whole_number
from kairox_jax.commands.offline import training

_SHARED = (
    Flag(dest="out", names=("-o", "--out"), help="folder for the files", convert=Path, metavar="FOLDER"),
    Flag(
        dest="text",
        names=("--text",),
        help="text of your own; may be given several times",
        convert=Path,
        default=(),
        metavar="FILE",
        repeat=True,
    ),
    Flag(dest="text_only", names=("--text-only",), help="leave out the texts of this Python installation"),
    Flag(
        dest="windows",
        names=("--windows",),
        help="windows of each kind of text and split",
        convert=positive_number,
        default=16,
        metavar="N",
    ),
    Flag(
        dest="window",
        names=("--window",),
        help="tokens of a window",
        convert=positive_number,
        default=256,
        metavar="TOKENS",
    ),
    Flag(
        dest="batch",
        names=("--batch",),
        help="windows run at a time",
        convert=positive_number,
        default=4,
        metavar="N",
    ),
    Flag(dest="debug", names=("--debug",), help="show the traceback of an error"),
)
_THRESHOLDS = (
    Flag(
        dest="max_loss",
        names=("--max-loss",),
        help="the most that each kind of text may lose, nats per token",
        convert=number,
        default=0.05,
        metavar="NATS",
    ),
    Flag(
        dest="active_frac",
        names=("--active-frac",),
        help="share of the neurons to leave active, in place of --max-loss",
        convert=number,
        metavar="SHARE",
    ),
)
_RELU = (
    Flag(dest="relu", names=("--relu",), help="distil the model into a ReLU model in place of thresholds"),
    Flag(
        dest="steps",
        names=("--steps",),
        help="steps of layer-wise distillation",
        convert=whole_number,
        default=400,
        metavar="N",
    ),
    Flag(
        dest="logit_steps",
        names=("--logit-steps",),
        help="steps of end-to-end distillation after them",
        convert=whole_number,
        default=400,
        metavar="N",
    ),
    Flag(
        dest="rank",
        names=("--rank",),
        help="train adapters of this rank; 0 trains the whole FFN",
        convert=whole_number,
        default=0,
        metavar="R",
    ),
    Flag(
        dest="learning_rate",
        names=("--learning-rate",),
        help="largest step size of AdamW",
        convert=number,
        default=3e-4,
        metavar="X",
    ),
    Flag(
        dest="save_every",
        names=("--save-every",),
        help="steps between checkpoints, from which the same command goes on",
        convert=positive_number,
        default=50,
        metavar="N",
    ),
    Flag(
        dest="seed",
        names=("--seed",),
        help="of the order of the text",
        convert=whole_number,
        default=0,
        metavar="N",
    ),
)


def add_to(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "sparsify",
        help="make a model sparse: thresholds, or a ReLU model by distillation",
        description="Choose activation thresholds, or distil a ReLU model (docs/offline_profile.md).",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="registered name, path or Hugging Face id")
    add_flags(parser, {"options": _SHARED, "thresholds": _THRESHOLDS, "distillation": _RELU})
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, engine_api: Any | None = None) -> int:
    """Choose thresholds or distil, write and report; return 0."""
    del engine_api
    if args.out is None:
        raise UsageError("kairox sparsify needs --out FOLDER: where to write its files")
    unused = _THRESHOLDS if args.relu else _RELU[1:]
    for flag in unused:
        if flag.dest in args.given:
            state = "with" if args.relu else "without"
            raise UsageError(f"{flag.names[0]} has no effect {state} --relu: leave it out")
    if args.relu:
        return training("relufy").run(args)
    thresholds = training("thresholds")
    thresholds.check_options(args)
    print(thresholds.execute(args))
    return 0
