"""Convert a checkpoint to an Orbax folder or a GGUF file: resumable, and in place only when it is whole."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairox_jax.io.checkpoint import Checkpoint
from kairox_jax.io.export_gguf import write_gguf
from kairox_jax.io.export_tensors import gguf_architecture, out_tensors
from kairox_jax.io.orbax_folder import WEIGHTS
from kairox_jax.io.orbax_write import Part, is_written, plan_parts, write_index, write_part
from kairox_jax.io.partial_target import PartialTarget, begin
from kairox_jax.io.sparsity import Sparsity, fingerprint, save_sparsity
from kairox_jax.io.stored_rows import KEEP
from kairox_jax.io.tokenizer_files import write_tokenizer

PREDICTORS = "predictors.safetensors"
KINDS = ("orbax", "gguf")
# For tokenizer, index and what Orbax writes beside its arrays.
_SPARE_BYTES = 32 * 2**20

# Called with the bytes that are written and the bytes in all.
Report = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What is to be done.

    Attributes:
        source: an open checkpoint.
        target: the folder, or the file.
        kind: one of ``KINDS``.
        quantize: one of ``stored_rows.QUANTIZE``.
        sparsity: thresholds and profile that go along, or None.
        predictors: file of trained predictors that goes along, or None.
        force: replace a target that exists.
    """

    source: Checkpoint
    target: Path
    kind: str = "orbax"
    quantize: str = KEEP
    sparsity: Sparsity | None = None
    predictors: Path | None = None
    force: bool = False


def convert(job: Conversion, *, note: Callable[[str], None], report: Report) -> None:
    """Convert a checkpoint.

    What is written lies in a folder beside the target until it is whole; a run that was broken off is gone on
    with where source and settings are the same.

    Args:
        job: what is to be done.
        note: told, in a line, that an earlier run is gone on with or thrown away.
        report: told how far it is.

    Raises:
        ValueError: the target exists or is the source; the model or a format cannot be written like that; the
            disk is full.
        FormatError: the source is broken.
        OSError: the target's folder cannot be written.
    """
    target, source = job.target.absolute(), job.source.path.absolute()
    if target == source or target in source.parents or source in target.parents:
        raise ValueError(f"{job.target} is the source, or holds it, or lies in it: give another name")
    # Mistakes are found before anything is written.
    parts = plan_parts(job.source, job.quantize) if job.kind == "orbax" else []
    num_bytes = sum(part.num_bytes for part in parts) if parts else _gguf_bytes(job)
    partial = begin(target, _identity(job), force=job.force)
    if partial.changed:
        note("an earlier run had another source or other settings: starting anew")
    elif partial.went_on:
        note("going on where an earlier run stopped")
    _check_room(partial, num_bytes)
    try:
        partial.finish(
            _write_orbax(job, parts, partial, report) if parts else _write_gguf(job, partial, report)
        )
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ValueError(
            f"the disk of {job.target} is full: free some of it and run the same again, which goes on where it stopped"
        ) from error


def _write_orbax(job: Conversion, parts: list[Part], partial: PartialTarget, report: Report) -> Path:
    folder, total, written = partial.folder / "folder", sum(part.num_bytes for part in parts), 0
    (folder / WEIGHTS).mkdir(parents=True, exist_ok=True)
    for scratch in (folder / WEIGHTS).glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(scratch)
    for part in parts:
        if not is_written(part, folder):
            write_part(job.source, part, folder)
        written += part.num_bytes
        report(written, total)
    path = job.source.tokenizer_path
    facts = {
        "tokenizer": None if path is None else write_tokenizer(path, folder),
        "quantize": job.quantize,
        "source": {"name": job.source.path.name, "fingerprint": fingerprint(job.source)},
    }
    if job.sparsity is not None:
        save_sparsity(folder, job.sparsity)
    if job.predictors is not None:
        shutil.copyfile(job.predictors, folder / PREDICTORS)
    write_index(folder, job.source, parts, facts)
    return folder


def _write_gguf(job: Conversion, partial: PartialTarget, report: Report) -> Path:
    path = partial.folder / "model.gguf"
    predictors = None if job.predictors is None else job.predictors.read_bytes()
    write_gguf(path, job.source, job.quantize, sparsity=job.sparsity, predictors=predictors, report=report)
    return path


def _gguf_bytes(job: Conversion) -> int:
    tensors = out_tensors(job.source, gguf_architecture(job.source.config), job.quantize)
    return sum(tensor.num_bytes for tensor in tensors)


def _identity(job: Conversion) -> dict[str, Any]:
    """Return what makes two runs the same: the source's files by size and time, and the settings."""
    path = job.source.path
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    if job.predictors is not None:
        files.append(job.predictors)
    stats = [(str(file.absolute()), file.stat()) for file in files]
    sparsity = None
    if job.sparsity is not None:
        sparsity = [float(value) for value in job.sparsity.thresholds]
    return {
        "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        "kind": job.kind,
        "quantize": job.quantize,
        "sparsity": sparsity,
    }


def _check_room(partial: PartialTarget, num_bytes: int) -> None:
    written = sum(file.stat().st_size for file in partial.folder.rglob("*") if file.is_file())
    needed, free = num_bytes - written + _SPARE_BYTES, shutil.disk_usage(partial.folder).free
    if needed > free:
        raise ValueError(
            f"{partial.target} needs {needed / 1e9:.2f} GB, its disk has {free / 1e9:.2f} GB left: free some of it, "
            "or give a place on another disk"
        )
