"""`kairox profile`: what a model's neurons do over text, as an activation profile."""

from __future__ import annotations

import argparse
from typing import Any

from kairox_jax.commands.flags import Flag, UsageError, add_flags, positive_number
from kairox_jax.commands.offline import training

FLAGS = (
    Flag(dest="out", names=("-o", "--out"), help="file to write, such as profile.npz", metavar="FILE"),
    Flag(dest="trace", names=("--trace",), help="also write every token's active neurons", metavar="FILE"),
    Flag(
        dest="sparsity",
        names=("--sparsity",),
        help="folder with the thresholds of a SiLU model; those shipped for it otherwise",
        metavar="FOLDER",
    ),
    Flag(
        dest="powerinfer",
        names=("--powerinfer",),
        help="take the counts of a PowerInfer folder (activation_0.pt, ...) in place of text",
        metavar="FOLDER",
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
    Flag(
        dest="sample_tokens",
        names=("--sample-tokens",),
        help="tokens whose active sets are kept, for co-activation",
        convert=positive_number,
        default=2048,
        metavar="N",
    ),
    Flag(
        dest="partners",
        names=("--partners",),
        help="neurons listed beside each as most often active with it",
        convert=positive_number,
        default=16,
        metavar="K",
    ),
    Flag(dest="show", names=("--show",), help="print a summary of the profile given in place of MODEL"),
    Flag(dest="debug", names=("--debug",), help="show the traceback of an error"),
)


def add_to(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "profile",
        help="measure what a model's neurons do over text",
        description="Run a model over text files and write its activation profile (docs/offline_profile.md).",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="registered name, path or Hugging Face id; with --show a file"
    )
    parser.add_argument("text", metavar="TEXT", nargs="*", help="UTF-8 text files")
    add_flags(parser, {"options": FLAGS})
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, engine_api: Any | None = None) -> int:
    """Measure, write and summarise; return 0."""
    del engine_api
    if args.show:
        given = [f"--{name.replace('_', '-')}" for name in sorted(args.given - {"show", "debug"})]
        return training("profile").show(args.model, [*args.text, *given])
    if args.out is None:
        raise UsageError("kairox profile needs --out FILE: where to write the profile")
    return training("profile").run(args)
