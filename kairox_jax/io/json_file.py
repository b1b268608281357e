"""JSON files of a checkpoint: read strictly, with every fault named by file and key."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairox_jax.io.errors import FormatError

LFS_POINTER = b"version https://git-lfs"
_MAX_BYTES = 128 * 2**20  # the largest tokenizer.json take 35 MB


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FormatError: the file is a Git-LFS pointer, no JSON, or no object; a key occurs twice; or it is too large.
    """
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise FormatError(path, "JSON", f"{size} bytes; at most {_MAX_BYTES} are read: this is no such file")
    return parse_json(path.read_bytes(), path)


def parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object; faults name ``path``."""
    if raw.startswith(LFS_POINTER):
        raise FormatError(path, "JSON", "this is a Git-LFS pointer, not the file: run `git lfs pull`")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise FormatError(path, twice, "the key occurs twice")
        return found

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(path, "JSON", f"broken: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(path, "JSON", f"expected an object, not a {type(value).__name__}")
    return value


@dataclass(frozen=True)
class JsonObject:
    """A JSON object with typed access; a missing key and null are the same."""

    path: Path
    values: dict[str, Any]

    def error(self, key: str, problem: str) -> FormatError:
        """Make the error that names this file and ``key``."""
        return FormatError(self.path, key, problem)

    def get(self, *keys: str, default: Any = None) -> Any:
        """Return the first of these keys that is there and not null."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), default)

    def whole(self, *keys: str, default: int | None = None) -> int:
        """Return a whole number, or the default; without one the key must be there."""
        value = self.get(*keys, default=default)
        if value is None:
            raise self.error(keys[0], "missing")
        if type(value) is not int:
            raise self.error(keys[0], f"{value!r:.80} is no whole number")
        return value

    def number(self, *keys: str, default: float) -> float:
        """Return a number, or the default."""
        value = self.get(*keys, default=default)
        if type(value) not in (int, float):
            raise self.error(keys[0], f"{value!r:.80} is no number")
        try:
            return float(value)
        except OverflowError:
            raise self.error(keys[0], "a number beyond any use") from None

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false, or the default."""
        value = self.get(key, default=default)
        if type(value) is not bool:
            raise self.error(key, f"{value!r:.80} is not true or false")
        return value

    def refuse(self, key: str, *neutral: Any, reason: str = "ignoring it would give wrong text") -> None:
        """Refuse a setting, for a reason, unless it is absent or one of the values that change nothing."""
        value = self.get(key)
        if value is not None and value not in neutral:
            raise self.error(key, f"{value!r:.200} is not supported: {reason}")
