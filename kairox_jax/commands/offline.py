"""The commands of the offline stage: a table of files of this folder, and the way up to `training`.

`training` imports this package, never the other way round: its modules are imported by name when a command runs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Files of this folder, one a line; a dash in the command's name is an underscore here.
COMMANDS: tuple[str, ...] = (
    "profile",
    "group",
    "sparsify",
    "train_predictors",
    "eval",
)


def add_to(subparsers: Any) -> None:
    """Add the subcommands."""
    for name in COMMANDS:
        import_module(f"kairox_jax.commands.{name}").add_to(subparsers)


def training(name: str) -> Any:
    """Import a module of `training`."""
    return import_module(f"training.{name}")
