"""Calibration and held-out text: splits documents, cuts token windows, and records what was used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from training.sources import KINDS, Document, order_key

SPLITS = ("calibration", "selection", "test")
PER_DOCUMENT = 2  # windows taken from one document, so that many documents are seen


@dataclass(frozen=True)
class Windows:
    """Token windows of one split.

    Attributes:
        ids: int32 [W, T].
        kinds: the kind of each window; windows of a kind are neighbours.
        used: what the windows were cut from: name, kind, bytes and sha256 of each document.
    """

    ids: Int[np.ndarray, "W T"]
    kinds: tuple[str, ...]
    used: tuple[dict[str, Any], ...]

    def rows(self, kind: str) -> np.ndarray:
        """Return the row numbers of a kind."""
        return np.flatnonzero(np.array([k == kind for k in self.kinds]))

    def first(self, per_kind: int) -> Windows:
        """Return the first ``per_kind`` windows of each kind."""
        rows = np.concatenate([self.rows(kind)[:per_kind] for kind in self.present()])
        return Windows(self.ids[rows], tuple(self.kinds[row] for row in rows), self.used)

    def present(self) -> list[str]:
        """Return the kinds that have windows, in the order of ``KINDS``."""
        return [kind for kind in KINDS if kind in self.kinds]


def split_of(group: str) -> str:
    """Return the split of a group of documents: half calibration, a quarter each selection and test."""
    return ("calibration", "selection", "calibration", "test")[order_key("split " + group)[0] % 4]


def cut_windows(
    documents: Iterable[Document],
    encode: Callable[[str], Sequence[int]],
    split: str,
    *,
    per_kind: int,
    tokens: int,
    bos_id: int | None = None,
) -> Windows:
    """Cut windows from the documents of a split, at most ``PER_DOCUMENT`` from one.

    Args:
        documents: all documents.
        encode: text to token ids, without special tokens.
        split: one of ``SPLITS``.
        per_kind: the most windows of each kind.
        tokens: T, tokens of a window.
        bos_id: put before every window (it counts as one of the T), for models that expect it.

    Raises:
        ValueError: there is no text, or no document is as long as a window.
    """
    chosen = sorted((d for d in documents if split_of(d.group) == split), key=lambda d: order_key(d.name))
    if not chosen:
        raise ValueError(f"there is no text for {split}: give more or longer texts")
    body = tokens - (bos_id is not None)
    rows: list[list[int]] = []
    kinds: list[str] = []
    used: list[dict[str, Any]] = []
    for kind in KINDS:
        of_kind: list[list[int]] = []
        for document in (d for d in chosen if d.kind == kind):
            if len(of_kind) == per_kind:
                break
            ids = list(encode(document.text))
            starts = range(0, len(ids) - body + 1, body)[: min(PER_DOCUMENT, per_kind - len(of_kind))]
            of_kind += [([] if bos_id is None else [bos_id]) + ids[s : s + body] for s in starts]
            if len(starts):
                used.append(_describe(document))
        rows += of_kind
        kinds += [kind] * len(of_kind)
    if not rows:
        raise ValueError(
            f"no text for {split} is as long as a window of {tokens} tokens: give longer texts, "
            "or a smaller --window"
        )
    return Windows(np.array(rows, np.int32), tuple(kinds), tuple(used))


def summary(windows: Windows) -> dict[str, Any]:
    """Return documents, bytes, tokens and one sha256 over all documents, for each kind."""
    result = {}
    for kind in windows.present():
        used = [entry for entry in windows.used if entry["kind"] == kind]
        result[kind] = {
            "documents": len(used),
            "bytes": sum(entry["bytes"] for entry in used),
            "tokens": len(windows.rows(kind)) * windows.ids.shape[1],
            "sha256": hashlib.sha256("".join(entry["sha256"] for entry in used).encode()).hexdigest(),
        }
    return result


def _describe(document: Document) -> dict[str, Any]:
    raw = document.text.encode()
    digest = hashlib.sha256(raw).hexdigest()
    return {"name": document.name, "kind": document.kind, "bytes": len(raw), "sha256": digest}
