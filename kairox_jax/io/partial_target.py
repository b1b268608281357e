"""The state of a conversion that is under way: written beside its target, so that a broken-off run can go on."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIX = ".kairox-partial"
STATE = "conversion.json"
REMEDY = "run the same `kairox convert` again, which goes on where it stopped, or delete the folder"


def partial_path(target: Path) -> Path:
    """Return where a conversion to ``target`` is written until it is whole."""
    return target.with_name(target.name + SUFFIX)


def is_unfinished(path: Path) -> bool:
    """Say whether a folder holds a conversion that was broken off."""
    return path.name.endswith(SUFFIX) or (path / STATE).is_file()


@dataclass(frozen=True, kw_only=True)
class PartialTarget:
    """A folder beside the target.

    Attributes:
        target: what it will become.
        folder: where it is written.
        went_on: it holds parts of an earlier run of the same conversion.
        changed: it held parts of an earlier run, but of another source or other settings; they are gone.
    """

    target: Path
    folder: Path
    went_on: bool
    changed: bool

    def finish(self, written: Path) -> None:
        """Put what was written into the target's place in one step, and remove the rest.

        Raises:
            OSError: the system refuses.
        """
        old = self.target.with_name(f"{self.target.name}.kairox-replaced")
        if self.target.exists():
            os.replace(self.target, old)
        (self.folder / STATE).unlink()
        os.replace(written, self.target)
        for path in (self.folder, old):
            _remove(path)


def begin(target: Path, identity: dict[str, Any], *, force: bool) -> PartialTarget:
    """Open the folder beside the target, with what an earlier run of the same conversion left there.

    Args:
        target: of the conversion.
        identity: what must be the same for the earlier parts to be of use: source and settings, as JSON.
        force: replace a target that exists.

    Raises:
        ValueError: the target exists and ``force`` is not given.
        OSError: the folder cannot be made.
    """
    if target.exists() and not force:
        raise ValueError(f"{target} exists: give --force to replace it, or another name")
    folder = partial_path(target)
    state = folder / STATE
    before = _read(state)
    went_on = before == identity
    if not went_on:
        _remove(folder)
        folder.mkdir(parents=True)
        state.write_text(json.dumps(identity))
    return PartialTarget(
        target=target, folder=folder, went_on=went_on, changed=before is not None and not went_on
    )


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
