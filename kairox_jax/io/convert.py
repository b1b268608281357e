"""Convert a checkpoint to an Orbax folder or a GGUF file: resumable, and in place only when it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairox_jax.io.checkpoint import Checkpoint
from kairox_jax.io.orbax_folder import WEIGHTS
from kairox_jax.io.orbax_write import is_written, plan_parts, write_index, write_part
from kairox_jax.io.partial_target import PartialTarget, begin
from kairox_jax.io.sparsity import Sparsity, fingerprint, save_sparsity
from kairox_jax.io.stored_rows import KEEP
from kairox_jax.io.tokenizer_files import write_tokenizer

PREDICTORS = "predictors.safetensors"
_SPARE_BYTES = 64 * 2**20  # for tokenizer, index and what Orbax writes beside its arrays


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What is to be done.

    Attributes:
        source: an open checkpoint.
        target: the folder, or the file.
        kind: ``orbax`` or ``gguf``.
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


Report = Callable[[int, int], None]
"""Called with the bytes that are written and the bytes in all."""


def convert(job: Conversion, *, note: Callable[[str], None], report: Report) -> None:
    """Convert a checkpoint.

    Args:
        job: what is to be done.
        note: told, in a line, that an earlier run is gone on with or thrown away.
        report: told how far it is.

    Raises:
        ValueError: the target exists, is the source, or a format does not fit the model.
        FormatError: the source is broken.
        OSError: the disk is full, or the target's folder cannot be written.
    """
    _check_target(job)
    plan = _plan_orbax(job) if job.kind == "orbax" else _plan_gguf(job)
    partial = begin(job.target, _identity(job), force=job.force)
    if partial.changed:
        note("an earlier run had another source or other settings: starting anew")
    elif partial.went_on:
        note("going on where an earlier run stopped")
    _check_room(job.target, plan.left_bytes(partial))
    partial.finish(plan.write(partial, report))
