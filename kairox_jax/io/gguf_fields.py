"""Typed access to a GGUF file's metadata; every fault names the file and the key."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from kairox_jax.io.errors import FormatError
from kairox_jax.io.gguf_file import GgufFile

T = TypeVar("T", str, int, float, bool)


def get_field(file: GgufFile, key: str, kind: type[T], default: T | None = None) -> T:
    """Return a value of the metadata; a list that says the same for every layer counts as that value.

    Args:
        file: an open file.
        key: the whole key.
        kind: type that the value must have; whole numbers pass as float.
        default: for a key that is not there; None: it must be there.

    Raises:
        FormatError: missing, or of another type.
    """
    value = file.fields.get(key, default)
    if value is None:
        raise FormatError(file.path, key, "missing; every model of this architecture needs it")
    if isinstance(value, np.ndarray) and value.ndim == 1 and len(value) and (value == value[0]).all():
        value = value[0].item()
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        shown = str(value).replace("\n", " ")[:80]
        raise FormatError(file.path, key, f"{shown!r} where a value of type {kind.__name__} is expected")
    return value
