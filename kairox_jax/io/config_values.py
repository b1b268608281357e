"""A ``ModelConfig`` as flat names and plain values, for files of our own, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from kairox_jax.config import ModelConfig, RopeScaling
from kairox_jax.io.errors import FormatError

_NESTED = "rope_scaling"


def config_values(config: ModelConfig) -> dict[str, Any]:
    """Return every field as a number, text, true or false, or list; None and empty ones are left out.

    The rotary scaling's fields follow as ``rope_scaling.kind`` and so on.
    """
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    nested = values.pop(_NESTED)
    if nested is not None:
        values |= {f"{_NESTED}.{item.name}": getattr(nested, item.name) for item in fields(nested)}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {name: value for name, value in plain.items() if value is not None and value != []}


def config_from_values(values: Mapping[str, Any], path: Path) -> ModelConfig:
    """Rebuild the config from what ``config_values`` gave.

    Args:
        values: names and values.
        path: the file they were read from, for messages.

    Raises:
        FormatError: a field is missing, unknown, or of a wrong kind or value.
    """
    nested = {name.removeprefix(f"{_NESTED}."): values[name] for name in values if name.startswith(_NESTED)}
    plain = {name: value for name, value in values.items() if not name.startswith(_NESTED)}
    _check_names(ModelConfig, plain, path, "")
    _check_names(RopeScaling, nested, path, f"{_NESTED}.")
    try:
        scaling = RopeScaling(**_tuples(nested)) if nested else None
        return ModelConfig(**_tuples(plain), rope_scaling=scaling)
    except (ValueError, TypeError) as error:
        raise FormatError(path, "config", str(error)) from None


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _check_names(kind: type, values: Mapping[str, Any], path: Path, prefix: str) -> None:
    known = {item.name: item for item in fields(kind)}
    for name in values:
        if name not in known:
            raise FormatError(
                path, f"config.{prefix}{name}", "unknown: a newer version of this program wrote the file"
            )
        if not _fits(str(known[name].type), values[name]):
            raise FormatError(
                path, f"config.{prefix}{name}", f"{values[name]!r} is not of type {known[name].type}"
            )
    if not values:
        return
    for name, item in known.items():
        if item.default is MISSING and name not in values:
            raise FormatError(path, f"config.{prefix}{name}", "missing")


def _fits(declared: str, value: Any) -> bool:
    """Say whether a value is of a field's declared type (text, as annotations are not evaluated)."""
    kind = declared.removesuffix(" | None")
    if kind.startswith("tuple["):
        item_kind = kind.removeprefix("tuple[").split(",")[0]
        return isinstance(value, list) and all(_fits(item_kind, item) for item in value)
    expected = {"int": int, "str": str, "bool": bool, "float": (int, float)}[kind]
    return isinstance(value, expected) and (kind == "bool" or not isinstance(value, bool))
