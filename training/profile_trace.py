"""Writes a trace whose length is not known beforehand: rows go to a file beside it, then into the archive."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8


class TraceWriter:
    """Takes packed steps and writes them in the trace format of ``kairox_jax.io.trace`` on ``close``.

    Args:
        path: of the trace; ``<path>.part`` holds the rows until then.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, path.with_name(path.name + ".part")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rows = open(self._part, "wb")  # noqa: SIM115 - closed by `close` or `discard`
        self._shape: tuple[int, ...] = ()
        self._ids: list[np.ndarray] = []

    def add(self, packed: UInt8[np.ndarray, "n L bytes"], ids: Int[np.ndarray, " n"]) -> None:
        """Take the next steps and their tokens."""
        self._rows.write(np.ascontiguousarray(packed).tobytes())
        self._shape = packed.shape[1:]
        self._ids.append(ids.astype(np.int64))

    def close(self, num_neurons: int, meta: dict[str, Any]) -> None:
        """Write the trace and remove the file of rows."""
        self._rows.close()
        ids = np.concatenate(self._ids)
        head = {"descr": "|u1", "fortran_order": False, "shape": (len(ids), *self._shape)}
        small = {
            "num_neurons": np.int64(num_neurons),
            "token_ids": ids,
            "meta": np.array(json.dumps({**meta, "steps": len(ids)})),
        }
        with zipfile.ZipFile(self._path, "w", zipfile.ZIP_DEFLATED) as archive:
            with archive.open("active.npy", "w", force_zip64=True) as out, open(self._part, "rb") as rows:
                np.lib.format.write_array_header_2_0(out, head)
                shutil.copyfileobj(rows, out, 1 << 20)
            for name, value in small.items():
                buffer = io.BytesIO()
                np.save(buffer, value)
                archive.writestr(f"{name}.npy", buffer.getvalue())
        self._part.unlink()

    def discard(self) -> None:
        """Remove what was written, after an error."""
        self._rows.close()
        self._part.unlink(missing_ok=True)
