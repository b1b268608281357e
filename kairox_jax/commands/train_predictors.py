"""`kairox train-predictors`: train activation predictors for a model on text."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from kairox_jax.commands.flags import Flag, UsageError, add_flags, number, positive_number, whole_number
from kairox_jax.commands.offline import training


def _flag(name: str, help: str, convert: Callable[[str], Any], default: Any, metavar: str) -> Flag:
    dest = name.replace("-", "_")
    return Flag(dest=dest, names=(f"--{name}",), help=help, convert=convert, default=default, metavar=metavar)


def _shares(text: str) -> dict[str, float]:
    """Convert ``prose=0.58,code=0.54``."""
    found: dict[str, float] = {}
    for part in text.split(","):
        kind, _, share = (word.strip() for word in part.partition("="))
        if not kind or not share:
            raise ValueError(f"{part!r} is no KIND=X, such as prose=0.58")
        if kind in found:
            raise ValueError(f"{kind} has two shares: give it one")
        found[kind] = number(share)
    return found


FILES = (
    Flag(dest="out", names=("-o", "--out"), metavar="FOLDER", help="folder for the files"),
    Flag(
        dest="work",
        names=("--work",),
        metavar="FOLDER",
        help="for activations and checkpoints while training, from which a killed run goes on; OUT/predictors.work "
        "where not given",
    ),
    Flag(dest="text_only", names=("--text-only",), help="leave out the texts of this Python installation"),
)
TEXT = (
    _flag("windows", "training windows of each kind of text", positive_number, 40, "N"),
    _flag("held", "held-out windows of each kind, and as many for the test", positive_number, 6, "N"),
    _flag("window", "tokens of a window", positive_number, 256, "TOKENS"),
    _flag("batch", "windows run at a time", positive_number, 4, "N"),
)
FIT = (
    _flag("steps", "most training steps of a layer", positive_number, 240, "N"),
    _flag("fit-batch", "tokens of a training step", positive_number, 512, "TOKENS"),
    _flag("rate", "AdamW's step size", number, 3e-3, "X"),
    _flag("every", "steps between held-out losses, and between checkpoints", positive_number, 60, "N"),
    _flag("patience", "held-out losses without a new best before a layer stops", positive_number, 3, "N"),
    _flag(
        "input",
        "what layer l reads: own, the residual stream after attention(l), or adjacent, after attention(l-1), so that "
        "FFN(l) is known one layer ahead (adjacent where not given, or as the predictors of --start)",
        str,
        None,
        "NAME",
    ),
    _flag("bytes", "share of the FFN's bytes that the predictors may take", number, 0.06, "X"),
    _flag("seed", "of the order of the tokens", whole_number, 0, "N"),
)
TOGETHER = (
    Flag(
        dest="start",
        names=("--start",),
        metavar="FOLDER",
        help="go on from these predictors of the model, instead of fitting each layer by itself first",
    ),
    _flag("distil-steps", "steps of training all layers together; 0 leaves it out", whole_number, 300, "N"),
    _flag("distil-batch", "windows of such a step", positive_number, 3, "N"),
    _flag("distil-rate", "its AdamW's step size", number, 3e-4, "X"),
    _flag(
        "distil-every", "its steps between held-out losses, and between checkpoints", positive_number, 50, "N"
    ),
    _flag(
        "distil-shares",
        "neurons that a kind of text may touch in it, where other than the target: prose=0.58,code=0.54",
        _shares,
        None,
        "KIND=X",
    ),
    _flag(
        "products",
        "of matrices in it: float32, or bfloat16 (faster where the CPU has AMX)",
        str,
        "float32",
        "TYPE",
    ),
)
TARGET = (
    _flag("share", "neurons touched on held-out text (0.54 where no target is given)", number, None, "X"),
    _flag("recall", "recall by contribution in each layer on held-out text", number, None, "X"),
    _flag("max-loss", "nats a token over dense on each kind of held-out text", number, None, "X"),
)
OUTPUT = (Flag(dest="debug", names=("--debug",), help="show the traceback of an error"),)


def add_to(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "train-predictors",
        help="train activation predictors on text",
        description="Train one low-rank predictor a layer, choose thresholds for one target, and write "
        "predictors.safetensors with a report and a plot.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="registered name, path or Hugging Face id")
    parser.add_argument("text", metavar="TEXT", nargs="*", help="UTF-8 text files beside Python's own texts")
    add_flags(
        parser,
        {
            "files": FILES,
            "text": TEXT,
            "training": FIT,
            "training together": TOGETHER,
            "target": TARGET,
            "output": OUTPUT,
        },
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, engine_api: Any | None = None) -> int:
    """Train and write; return 0."""
    del engine_api
    if args.out is None:
        raise UsageError("kairox train-predictors needs --out FOLDER: where to write the predictors")
    given = [name for name in ("share", "recall", "max_loss") if getattr(args, name) is not None]
    if len(given) > 1:
        words = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{words} exclude each other: give one target")
    return training("predictors").run(args)
