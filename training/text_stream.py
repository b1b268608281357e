"""Token windows from text files, one batch at a time: memory does not grow with the text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

PIECE_CHARS = 1 << 16


@dataclass
class TextStream:
    """Cuts files into windows of one length; what is left of a file after its last whole window is not used.

    Attributes:
        paths: UTF-8 text files.
        encode: text to token ids, without special tokens.
        tokens: T, tokens of a window.
        bos_id: put before every window (it counts as one of the T), for models that expect it.
        files: name, bytes, sha256 and windows of each file read so far.
        read_bytes: of all files, so far.
    """

    paths: Sequence[Path]
    encode: Callable[[str], Sequence[int]]
    tokens: int
    bos_id: int | None = None
    files: list[dict[str, Any]] = field(default_factory=list)
    read_bytes: int = 0

    def total_bytes(self) -> int:
        """Return the size of all files.

        Raises:
            ValueError: a file is missing.
        """
        try:
            return sum(path.stat().st_size for path in self.paths)
        except OSError as error:
            raise ValueError(f"cannot read text {error.filename}: {error.strerror}; check the path") from None

    def batches(self, size: int) -> Iterator[Int[np.ndarray, "B T"]]:
        """Yield windows, ``size`` at a time; the last batch may be smaller.

        Raises:
            ValueError: a file is empty or not UTF-8, or no file is as long as a window.
        """
        rows: list[list[int]] = []
        for path in self.paths:
            for row in self._windows(path):
                rows.append(row)
                if len(rows) == size:
                    yield np.array(rows, np.int32)
                    rows = []
        if rows:
            yield np.array(rows, np.int32)
        if not sum(file["windows"] for file in self.files):
            raise ValueError(
                f"no text is as long as a window of {self.tokens} tokens: give longer files, or a smaller --window"
            )

    def _windows(self, path: Path) -> Iterator[list[int]]:
        begin = [] if self.bos_id is None else [self.bos_id]
        body = self.tokens - len(begin)
        digest, num_bytes, count, left = hashlib.sha256(), 0, 0, list[int]()
        for piece in _pieces(path):
            raw = piece.encode()
            digest.update(raw)
            num_bytes += len(raw)
            self.read_bytes += len(raw)
            left += self.encode(piece)
            for start in range(0, len(left) - body + 1, body):
                yield begin + left[start : start + body]
                count += 1
            left = left[len(left) // body * body :]
        if not num_bytes:
            raise ValueError(f"text {path} is empty: give a file with text")
        facts = {"name": path.name, "bytes": num_bytes, "sha256": digest.hexdigest(), "windows": count}
        self.files.append(facts)


def _pieces(path: Path) -> Iterator[str]:
    """Read a file piece by piece, cut after a line end or a blank, so that few words are cut."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rest = ""
            while chunk := file.read(PIECE_CHARS):
                text = rest + chunk
                cut = max(text.rfind("\n"), text.rfind(" ")) + 1 or len(text)
                rest = text[cut:]
                yield text[:cut]
            if rest:
                yield rest
    except OSError as error:
        raise ValueError(f"cannot read text {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"text {path} is not UTF-8 ({error.reason}): give a UTF-8 text file") from None
