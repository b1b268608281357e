"""Write a checkpoint as an Orbax folder, one part after the other, so that a broken-off run can go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kairox_jax.config import ModelConfig
from kairox_jax.io.checkpoint import Checkpoint
from kairox_jax.io.config_values import config_values
from kairox_jax.io.orbax_arrays import save_arrays
from kairox_jax.io.orbax_folder import FORMAT, INDEX, RECORDS, TABLES, VECTORS, WEIGHTS, Place
from kairox_jax.io.stored_rows import FFN_ROWS, stored_format, stored_rows
from kairox_jax.quant import PackedRows, RecordLayout

_DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, kw_only=True)
class Part:
    """Arrays that are written at once.

    Attributes:
        name: its folder under ``weights``.
        places: where each of its canonical weights will lie.
        layout: of the records, in a part of records.
    """

    name: str
    places: dict[str, Place]
    layout: RecordLayout | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that its arrays take."""
        if self.layout is not None:
            return next(iter(self.places.values())).shape[0] * self.layout.record_bytes
        return sum(place.num_bytes for place in self.places.values())


def plan_parts(checkpoint: Checkpoint, quantize: str) -> list[Part]:
    """Say which parts a checkpoint is written in; no weight is read.

    Raises:
        ValueError: a matrix cannot be quantised like that (see ``stored_format``).
    """
    config = checkpoint.config
    by_part: dict[str, list[str]] = {}
    for name in checkpoint.names():
        by_part.setdefault(_part_name(checkpoint, name), []).append(name)
    parts = []
    for part, names in by_part.items():
        if part.startswith(f"{RECORDS}."):
            parts.append(_record_part(checkpoint, config, part, quantize))
            continue
        places = {
            name: Place(
                part=part,
                array=name,
                format=stored_format(checkpoint, name, quantize),
                shape=checkpoint.shape(name),
            )
            for name in names
        }
        parts.append(Part(name=part, places=places))
    return parts


def write_part(checkpoint: Checkpoint, part: Part, folder: Path) -> None:
    """Write one part; it appears under its name when it is whole. Holds its arrays in memory.

    Raises:
        OSError: the disk is full or the folder cannot be written.
        FormatError: a weight holds a NaN or an infinity.
    """
    save_arrays(folder / WEIGHTS / part.name, dict(_arrays(checkpoint, part)))
    checkpoint.release()


def is_written(part: Part, folder: Path) -> bool:
    """Say whether a part is there, whole."""
    return (folder / WEIGHTS / part.name).is_dir()


def write_index(folder: Path, checkpoint: Checkpoint, parts: list[Part], facts: dict[str, Any]) -> None:
    """Write ``kairox.json``, which makes the folder a checkpoint.

    Args:
        folder: with all parts.
        checkpoint: the source.
        parts: as written.
        facts: goes into the file as it is (source, tokenizer).
    """
    weights = {
        name: {key: value for key, value in vars(place).items() if value is not None}
        for part in parts
        for name, place in part.places.items()
    }
    content = {
        "format": FORMAT,
        "config": config_values(checkpoint.config),
        "activation_source": checkpoint.activation_source,
        "chat_template": checkpoint.chat_template,
        **facts,
        "weights": weights,
    }
    if checkpoint.sparse_threshold is not None:
        content["sparse_threshold"] = checkpoint.sparse_threshold
    (folder / INDEX).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _part_name(checkpoint: Checkpoint, name: str) -> str:
    if len(checkpoint.shape(name)) == 1:
        return VECTORS
    if not name.startswith("layers."):
        return TABLES
    _, layer, last = name.split(".")
    kind = RECORDS if last in FFN_ROWS else "predictors" if last.startswith("pred_") else "attention"
    return f"{kind}.{layer}"


def _record_part(checkpoint: Checkpoint, config: ModelConfig, part: str, quantize: str) -> Part:
    prefix = f"layers.{part.split('.')[1]}."
    names = [prefix + row for row in FFN_ROWS if config.gated or row != "w_gate"]
    *inputs, down = (stored_format(checkpoint, name, quantize) for name in names)
    row = inputs[0] if len(set(inputs)) == 1 else "f32"
    layout = RecordLayout(num_elems=config.d_model, formats=(row,) * len(inputs) + (down,))
    places = {
        name: Place(
            part=part, array=RECORDS, format=fmt, shape=(config.num_neurons, config.d_model), first_byte=first
        )
        for name, fmt, first in zip(names, layout.formats, layout.offsets, strict=True)
    }
    return Part(name=part, places=places, layout=layout)


def _arrays(checkpoint: Checkpoint, part: Part) -> Iterator[tuple[str, np.ndarray]]:
    if part.layout is not None:
        first = next(iter(part.places.values()))
        records = np.zeros((first.shape[0], part.layout.record_bytes), np.uint8)
        for row, (name, place) in enumerate(part.places.items()):
            part.layout.put(records, row, stored_rows(checkpoint, name, place.format))
        yield RECORDS, records
        return
    for name, place in part.places.items():
        if len(place.shape) == 1:
            yield name, checkpoint.tensor(name)
        else:
            yield name, _as_array(stored_rows(checkpoint, name, place.format))


def _as_array(rows: PackedRows) -> np.ndarray:
    """Return single weights in their own type; blocks stay bytes."""
    data = np.ascontiguousarray(rows.data)
    return data.view(_DTYPES[rows.format]) if rows.format in _DTYPES else data
