"""The trace format: which neurons were active at each step and layer, packed to bits in an .npz file.

Reading validates; the engine writes traces with the same functions.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int64, UInt8


@dataclass(frozen=True, eq=False)
class Trace:
    """Activations of one text.

    Attributes:
        packed: uint8 [steps, L, ceil(F / 8)], ``np.packbits`` along the last axis.
        num_neurons: F.
        token_ids: int64 [steps], or None.
        meta: free facts, such as model and text.
        name: for messages and tables.
    """

    packed: UInt8[np.ndarray, "steps L bytes"]
    num_neurons: int
    token_ids: Int64[np.ndarray, " steps"] | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    name: str = "trace"

    @property
    def num_steps(self) -> int:
        """Steps (tokens)."""
        return self.packed.shape[0]

    @property
    def num_layers(self) -> int:
        """L."""
        return self.packed.shape[1]

    def active(self, step: int) -> Bool[np.ndarray, "L F"]:
        """Return what was active at ``step``."""
        return np.unpackbits(self.packed[step], axis=-1, count=self.num_neurons).view(bool)

    def frequencies(self, steps: slice = slice(None)) -> Float32[np.ndarray, "L F"]:
        """Return the share of ``steps`` at which each neuron was active."""
        counts = np.zeros((self.num_layers, self.num_neurons), np.int64)
        chosen = self.packed[steps]
        for row in chosen:
            counts += np.unpackbits(row, axis=-1, count=self.num_neurons)
        return (counts / max(len(chosen), 1)).astype(np.float32)

    def cut(self, steps: slice) -> Trace:
        """Return the trace of some of the steps."""
        ids = None if self.token_ids is None else self.token_ids[steps]
        return Trace(self.packed[steps], self.num_neurons, ids, self.meta, self.name)


def read_trace(path: str | Path) -> Trace:
    """Read and validate a trace.

    Raises:
        ValueError: not a trace; says in which way.
        FileNotFoundError: no such file.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            fields = {key: archive[key] for key in archive.files}
    except (zipfile.BadZipFile, ValueError, EOFError, AttributeError, TypeError):
        raise ValueError(
            f"trace {path} is no .npz archive of plain arrays: record one with --trace-out"
        ) from None
    for key in ("active", "num_neurons"):
        if key not in fields:
            raise ValueError(f"trace {path}: field {key!r} is missing, it has {sorted(fields)}")
    packed, count = fields["active"], fields["num_neurons"]
    if packed.dtype != np.uint8 or packed.ndim != 3 or 0 in packed.shape:
        raise ValueError(
            f"trace {path}: active is {packed.dtype}{list(packed.shape)}, "
            "expected uint8 [steps, L, ceil(F/8)]"
        )
    if count.dtype.kind not in "iu" or count.shape != () or (int(count) + 7) // 8 != packed.shape[2]:
        raise ValueError(
            f"trace {path}: num_neurons {count!s} does not fit the {packed.shape[2]} bytes of a layer"
        )
    return Trace(
        packed,
        _checked_padding(path, packed, int(count)),
        _read_ids(path, fields.get("token_ids"), packed.shape[0]),
        _read_meta(path, fields.get("meta")),
        Path(path).stem,
    )


def _checked_padding(path: str | Path, packed: np.ndarray, num_neurons: int) -> int:
    spare = -num_neurons % 8
    if spare and (packed[..., -1] & ((1 << spare) - 1)).any():
        raise ValueError(
            f"trace {path}: bits are set beyond num_neurons {num_neurons}: one of the two is wrong"
        )
    return num_neurons


def _read_ids(path: str | Path, ids: np.ndarray | None, steps: int) -> np.ndarray | None:
    if ids is None:
        return None
    if ids.dtype.kind not in "iu" or ids.shape != (steps,):
        raise ValueError(
            f"trace {path}: token_ids is {ids.dtype}{list(ids.shape)}, expected integers [{steps}]"
        )
    return ids.astype(np.int64)


def _read_meta(path: str | Path, text: np.ndarray | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        meta = json.loads(str(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"trace {path}: meta is no JSON text ({error})") from None
    if not isinstance(meta, dict):
        raise ValueError(f"trace {path}: meta is a JSON {type(meta).__name__}, expected an object")
    return meta


def write_trace(
    path: str | Path,
    active: Bool[np.ndarray, "steps L F"],
    token_ids: np.ndarray | None = None,
    meta: dict[str, Any] | None = None,
) -> None:
    """Write activations in the trace format.

    Raises:
        ValueError: shapes that do not fit.
    """
    recorder = TraceRecorder(meta)
    for step, rows in enumerate(active):
        recorder.add_step(rows, None if token_ids is None else int(token_ids[step]))
    recorder.write(path)


class TraceRecorder:
    """Collects the steps of a generation, packed to bits, and writes them as one trace.

    Args:
        meta: free facts that go into the file.
    """

    def __init__(self, meta: dict[str, Any] | None = None) -> None:
        self._meta = dict(meta or {})
        self._rows: list[np.ndarray] = []
        self._ids: list[int] = []
        self._shape: tuple[int, ...] | None = None

    def add_step(self, active: Bool[np.ndarray, "L F"], token_id: int | None = None) -> None:
        """Take what was active in one step.

        Raises:
            ValueError: not bool, another shape than before, or a token id only now and then.
        """
        if active.dtype != bool or active.ndim != 2 or (self._shape or active.shape) != active.shape:
            raise ValueError(
                f"step {len(self._rows)} is {active.dtype}{list(active.shape)}, expected bool "
                f"{list(self._shape or ('L', 'F'))}"
            )
        if self._rows and (token_id is None) != (not self._ids):
            raise ValueError(f"step {len(self._rows)}: give a token id at every step, or at none")
        self._shape = active.shape
        self._rows.append(np.packbits(active, axis=-1))
        if token_id is not None:
            self._ids.append(token_id)

    def write(self, path: str | Path) -> None:
        """Write the file.

        Raises:
            ValueError: nothing was recorded.
        """
        if self._shape is None:
            raise ValueError(f"trace {path}: no step was recorded, generate at least one token")
        fields: dict[str, Any] = {
            "active": np.stack(self._rows),
            "num_neurons": np.int64(self._shape[1]),
            "meta": np.array(json.dumps({**self._meta, "steps": len(self._rows)})),
        }
        if self._ids:
            fields["token_ids"] = np.array(self._ids, np.int64)
        with open(path, "wb") as file:
            np.savez_compressed(file, **fields)
