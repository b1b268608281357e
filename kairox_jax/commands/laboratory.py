"""`kairox replay` and `kairox compare`: placement policies on recorded traces, without a model."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from kairox_jax.commands.flags import Flag, add_flags

FLAGS = (Flag(dest="debug", names=("--debug",), help="show the traceback of an error"),)
COMMANDS = {
    "replay": "run one policy over recorded traces on simulated hardware",
    "compare": "compare policies, hardware and capacities over recorded traces",
}


def add_to(subparsers: Any, chosen: str | None) -> None:
    """Add both subcommands; the arguments only of the chosen one, so that others start without the simulator."""
    for name, text in COMMANDS.items():
        parser = subparsers.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        flags: dict[str, tuple[Flag, ...]] = {}
        if name == chosen:
            parser.add_argument("traces", nargs="+", metavar="TRACE", help="trace files (.npz) of one model")
            flags = _flags(name)
        add_flags(parser, {**flags, "output": FLAGS})
        parser.set_defaults(run=run)


def all_flags() -> list[Flag]:
    """Return the flags of both; loads the simulator."""
    return [flag for name in COMMANDS for flags in _flags(name).values() for flag in flags]


def _flags(name: str) -> dict[str, tuple[Flag, ...]]:
    return import_module(f"kairox_jax.commands.{name}").FLAGS


def run(args: argparse.Namespace, engine_api: Any | None = None) -> int:
    """Run the chosen one; return its status."""
    del engine_api
    return getattr(import_module(f"kairox_jax.commands.{args.command}"), f"run_{args.command}")(args)
