"""Errors of reading and fetching models: one line each, with the file, the field and the remedy."""

from __future__ import annotations

from os import PathLike
from pathlib import Path


class FormatError(ValueError):
    """A model file is broken, or holds something that is not supported.

    Attributes:
        path: the file.
        field: the key, tensor or part of the file that is wrong.
    """

    def __init__(self, path: str | PathLike[str], field: str, problem: str) -> None:
        place = f"{path}" if Path(path).name == field else f"{path}: {field}"
        super().__init__(f"{place}: {problem}")
        self.path = path
        self.field = field


class FetchError(ValueError):
    """A model could not be fetched; the message says what to do instead."""
