"""`kairox eval`: loss, agreement with dense, recall and touched neurons on text, by mode."""

from __future__ import annotations

import argparse
from typing import Any

from kairox_jax.commands.flags import Flag, add_flags, positive_number
from kairox_jax.commands.offline import training
from kairox_jax.config import MODES


def _modes(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in MODES:
            raise ValueError(f"{name!r} is not one of {', '.join(MODES)}")
    return names


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is no list of shares, such as 0.2,0.4,0.6") from None
    if not all(0 < share < 1 for share in shares):
        raise ValueError(f"{text!r}: shares lie between 0 and 1")
    return shares


def _window(text: str) -> int:
    if (value := positive_number(text)) < 2:
        raise ValueError(f"{text!r} must be 2 or more: the first token predicts the second")
    return value


FLAGS = (
    Flag(
        dest="modes",
        names=("--modes",),
        metavar="A,B",
        convert=_modes,
        default=("dense", "exact", "predicted"),
        help="which of dense, exact and predicted are shown; dense is always run",
    ),
    Flag(
        dest="curve",
        names=("--curve",),
        metavar="SHARES",
        convert=_shares,
        default=(),
        help="also predicted at these touched shares, beside the oracle and random choice: 0.2,0.4,0.6",
    ),
    Flag(
        dest="predictors",
        names=("--predictors",),
        metavar="FOLDER",
        help="predictors of the model; its own or the shipped ones where not given",
    ),
    Flag(
        dest="sparsity",
        names=("--sparsity",),
        metavar="FOLDER",
        help="thresholds of a SiLU model; the shipped ones where not given",
    ),
    Flag(
        dest="window",
        names=("--window",),
        metavar="TOKENS",
        convert=_window,
        default=256,
        help="tokens of a window",
    ),
    Flag(
        dest="tokens",
        names=("--tokens",),
        metavar="N",
        convert=positive_number,
        default=4096,
        help="tokens of each text that are used, from its beginning",
    ),
    Flag(
        dest="batch",
        names=("--batch",),
        metavar="N",
        convert=positive_number,
        default=4,
        help="windows run at a time",
    ),
    Flag(dest="json", names=("--json",), help="print one JSON object"),
    Flag(dest="quiet", names=("--quiet",), help="no progress on standard error"),
    Flag(dest="debug", names=("--debug",), help="show the traceback of an error"),
)


def add_to(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "eval",
        help="measure modes on text: loss, agreement with dense, recall, touched neurons",
        description="Run a model over text in several modes and compare each with dense.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="registered name, path or Hugging Face id")
    parser.add_argument(
        "text", metavar="TEXT", nargs="*", help="UTF-8 text files; the ending tells code and JSON"
    )
    add_flags(parser, {"evaluation": FLAGS})
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, engine_api: Any | None = None) -> int:
    """Measure and print; return 0."""
    del engine_api
    return training("evaluation").run(args)
