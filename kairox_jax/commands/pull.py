"""`kairox pull`: fetch a model into the cache."""

from __future__ import annotations

import argparse
from typing import Any

from kairox_jax.commands.flags import Flag, add_flags

FLAGS = (Flag(dest="debug", names=("--debug",), help="show the traceback of an error"),)


def add_to(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "pull",
        help="fetch a model into the cache",
        description="Fetch a model once, check it, print where it is. Other commands do so by themselves.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name", metavar="NAME", help="smollm2-135m, or a Hugging Face repository such as org/name"
    )
    add_flags(parser, {"output": FLAGS})
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, engine_api: Any | None = None) -> int:
    """Fetch the model and print its path; return 0."""
    del engine_api
    from kairox_jax.io import resolve_model

    print(resolve_model(args.name))
    return 0
