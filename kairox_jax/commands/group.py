"""`kairox group`: put neurons that are active together into groups that travel together."""

from __future__ import annotations

import argparse
from typing import Any

from kairox_jax.commands.flags import Flag, UsageError, add_flags, positive_number
from kairox_jax.commands.offline import training

FLAGS = (
    Flag(dest="out", names=("-o", "--out"), help="file to write, such as grouping.npz", metavar="FILE"),
    Flag(
        dest="group_size",
        names=("--group-size",),
        help="neurons of a group; divides the neurons of a layer",
        convert=positive_number,
        default=16,
        metavar="G",
    ),
    Flag(
        dest="tokens",
        names=("--tokens",),
        help="the most tokens taken from the source",
        convert=positive_number,
        default=4096,
        metavar="N",
    ),
    Flag(dest="model", names=("-m", "--model"), help="refuse a source of another model", metavar="MODEL"),
    Flag(dest="json", names=("--json",), help="print one JSON object"),
    Flag(dest="debug", names=("--debug",), help="show the traceback of an error"),
)


def add_to(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "group",
        help="group neurons that are active together",
        description="Group each layer's neurons by co-activation (docs/offline_profile.md); needs pymetis.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="PROFILE", help="file of `kairox profile`, or a trace")
    add_flags(parser, {"options": FLAGS})
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, engine_api: Any | None = None) -> int:
    """Group, write and report; return 0."""
    del engine_api
    if args.out is None:
        raise UsageError("kairox group needs --out FILE: where to write the grouping")
    return training("group").run(args)
