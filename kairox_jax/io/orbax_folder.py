"""A model in an Orbax folder: ``kairox.json``, parts of arrays, tokenizer, sparsity; read when asked for.

``kairox.json`` says where each canonical weight lies; docs/import.md describes the folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kairox_jax.config import ModelConfig
from kairox_jax.io.config_values import config_from_values
from kairox_jax.io.errors import FormatError
from kairox_jax.io.json_file import JsonObject, read_json
from kairox_jax.io.orbax_arrays import REMEDY, restore_arrays
from kairox_jax.io.weights import Entry
from kairox_jax.quant import block_format

if TYPE_CHECKING:
    import jax

    from kairox_jax.io.orbax_arrays import ShardingOf

FORMAT = 1
INDEX = "kairox.json"
WEIGHTS = "weights"
VECTORS, TABLES = "vectors", "tables"
RECORDS = "records"  # the one array of a part ``records.{l}``


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a canonical weight lies.

    Attributes:
        part: folder under ``weights``.
        array: name in that part.
        format: of its rows, a key of ``quant.FORMATS``.
        shape: canonical.
        first_byte: of the row in each record; None for an array of its own.
    """

    part: str
    array: str
    format: str
    shape: tuple[int, ...]
    first_byte: int | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, of the vector for one axis."""
        return block_format(self.format).row_bytes(self.shape[-1])

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.row_bytes * prod(self.shape[:-1])


def is_orbax_folder(path: Path) -> bool:
    """Say whether a folder was written by ``kairox convert``."""
    return (path / INDEX).is_file()


class OrbaxFolder:
    """All weights of an Orbax folder; holds one layer's arrays at a time.

    Attributes:
        path: the folder.
        config: the model's facts.
        index: what ``kairox.json`` says.
        places: where each canonical weight lies.
        shapes: canonical shape of each weight.
        num_bytes: bytes of all weights, as stored.
    """

    def __init__(self, path: Path) -> None:
        """Read ``kairox.json``; no weight is read.

        Raises:
            FormatError: it is broken, of another format, or a part is missing.
        """
        self.path = path
        self.index = JsonObject(path / INDEX, read_json(path / INDEX))
        if self.index.whole("format") != FORMAT:
            raise self.index.error(
                "format", f"{self.index.get('format')}; this version reads {FORMAT}: convert the source again"
            )
        config = self.index.get("config")
        if not isinstance(config, dict):
            raise self.index.error("config", "missing; expected an object")
        self.config: ModelConfig = config_from_values(config, path / INDEX)
        self.places = _read_places(self.index)
        for part in {place.part for place in self.places.values()}:
            if not (path / WEIGHTS / part).is_dir():
                raise FormatError(path / WEIGHTS / part, "part", f"missing: {REMEDY}")
        self.shapes: Mapping[str, tuple[int, ...]] = {name: p.shape for name, p in self.places.items()}
        self.num_bytes = sum(place.num_bytes for place in self.places.values())
        self._vectors: dict[str, np.ndarray] = {}
        self._held: dict[str, tuple[str, dict[str, np.ndarray]]] = {}

    def entries(self) -> dict[str, Entry]:
        """List the canonical weights, which lie here under their own names."""
        return {name: Entry(source=name, shape=place.shape) for name, place in self.places.items()}

    def path_of(self, name: str) -> Path:
        """Return the folder of the part that holds a weight."""
        return self.path / WEIGHTS / self.places[name].part

    def format_of(self, name: str) -> str:
        """Return the name of a weight's row format."""
        return self.places[name].format

    def raw(self, name: str) -> tuple[np.ndarray, str]:
        """Return a weight's bytes, uint8 [*leading, row bytes], read-only, and its format's name.

        Raises:
            FormatError: the array is missing, damaged or of another size.
        """
        place = self.places[name]
        data = self._array(place)
        want = (*place.shape[:-1], place.row_bytes)
        if place.first_byte is not None:
            data = data[:, place.first_byte : place.first_byte + place.row_bytes]
        if data.shape != want:
            raise FormatError(
                self.path_of(name), name, f"{list(data.shape)} bytes where {list(want)} belong: {REMEDY}"
            )
        data.flags.writeable = False
        return data, place.format

    def release(self, name: str | None = None) -> None:
        """Let go of the layer that is held; views stay valid. One weight's name changes nothing."""
        if name is None:
            self._held.clear()

    def restore(self, names: Sequence[str], sharding_of: ShardingOf) -> dict[str, jax.Array]:
        """Read weights straight onto devices, as they are stored; each device reads its own part.

        Args:
            names: canonical names, or ``layers.{l}.records`` for a layer's neurons (uint8 [F, record bytes]).
            sharding_of: gives the sharding by name and stored shape. Matrices in blocks (q8_0 and the
                like) are uint8 [rows, row bytes].

        Raises:
            ValueError: an unknown name, or the rows of neurons by name.
            FormatError: the checkpoint is damaged.
        """
        wanted: dict[str, list[str]] = {}
        for name in names:
            wanted.setdefault(self._part_of(name), []).append(name)
        arrays: dict[str, jax.Array] = {}
        for part, of_part in wanted.items():
            keys = [RECORDS if part.startswith(f"{RECORDS}.") else name for name in of_part]
            ours = dict(zip(keys, of_part, strict=True))
            found = restore_arrays(
                self.path / WEIGHTS / part, keys, lambda key, shape, ours=ours: sharding_of(ours[key], shape)
            )
            arrays |= {ours[key]: found[key] for key in keys}
        return arrays

    def _part_of(self, name: str) -> str:
        if name.startswith("layers.") and name.endswith(f".{RECORDS}"):
            part = f"{RECORDS}.{name.split('.')[1]}"
            if any(place.part == part for place in self.places.values()):
                return part
        place = self.places.get(name)
        if place is None:
            raise ValueError(f"{self.path} has no weight {name!r}: see {INDEX} for what it holds")
        if place.first_byte is not None:
            raise ValueError(
                f"{name!r} is a row of the layer's records: ask for 'layers.{name.split('.')[1]}.{RECORDS}'"
            )
        return place.part

    def _array(self, place: Place) -> np.ndarray:
        kind = place.part.split(".")[0]
        if kind == VECTORS:
            if not self._vectors:
                names = [p.array for p in self.places.values() if p.part == VECTORS]
                self._vectors = self._restore(VECTORS, names)
            return self._vectors[place.array]
        key = f"{place.part}/{place.array}" if kind == TABLES else place.part
        held, arrays = self._held.get(kind, ("", {}))
        if held != key:
            self._held.pop(kind, None)
            same = [place] if kind == TABLES else [p for p in self.places.values() if p.part == place.part]
            arrays = self._restore(place.part, list(dict.fromkeys(p.array for p in same)))
            self._held[kind] = (key, arrays)
        return arrays[place.array]

    def _restore(self, part: str, names: list[str]) -> dict[str, np.ndarray]:
        found = restore_arrays(self.path / WEIGHTS / part, names)
        return {name: np.ascontiguousarray(found[name]).view(np.uint8) for name in names}


def _read_places(index: JsonObject) -> dict[str, Place]:
    weights = index.get("weights")
    if not isinstance(weights, dict) or not weights:
        raise index.error("weights", "missing or empty; expected the canonical weights")
    return {name: _read_place(index, name, value) for name, value in weights.items()}


def _read_place(index: JsonObject, name: str, value: Any) -> Place:
    if not isinstance(value, dict):
        raise index.error(f"weights.{name}", f"{value!r}: expected an object")
    entry = JsonObject(index.path, value)
    part, array, shape = entry.get("part"), entry.get("array"), entry.get("shape")
    if not isinstance(part, str) or Path(part).name != part or not isinstance(array, str):
        raise index.error(f"weights.{name}", f"part {part!r}, array {array!r}: expected two names")
    whole = isinstance(shape, list) and 1 <= len(shape) <= 2 and all(type(n) is int and n > 0 for n in shape)
    if not whole:
        raise index.error(f"weights.{name}.shape", f"{shape!r}: expected one or two whole numbers above zero")
    place = Place(
        part=part,
        array=array,
        format=str(entry.get("format")),
        shape=tuple(shape),
        first_byte=None if entry.get("first_byte") is None else entry.whole("first_byte"),
    )
    try:
        _ = place.row_bytes
    except ValueError as error:
        raise index.error(f"weights.{name}", str(error)) from None
    return place
