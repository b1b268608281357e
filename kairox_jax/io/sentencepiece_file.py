"""SentencePiece's own ``tokenizer.model``: the few fields of its protocol buffer that a BPE vocabulary needs."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kairox_jax.io.errors import FormatError
from kairox_jax.io.sentencepiece_vocab import NORMAL, UNKNOWN, SentencePieceVocab

# Field numbers of sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _BPE = 3, 2
_CHARSMAP, _DUMMY_PREFIX, _EXTRA_SPACES = 2, 3, 4
_MAX_BYTES = 64 * 2**20  # the largest vocabularies take 4 MB


class _Field(NamedTuple):
    """One field: its number, and an integer or its bytes."""

    number: int
    value: int | memoryview


def read_sentencepiece(path: Path) -> SentencePieceVocab:
    """Read a ``tokenizer.model``.

    Raises:
        FormatError: it is damaged, no BPE vocabulary, or normalises text in a way that is not supported.
    """
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise FormatError(path, "size", f"{size} bytes; at most {_MAX_BYTES} are read: this is no vocabulary")
    tokens, scores, types = [], [], []
    trainer: dict[int, int | memoryview] = {}
    normalizer: dict[int, int | memoryview] = {}
    for number, value in _fields(memoryview(path.read_bytes()), path, "model"):
        if number == _PIECES:
            token, score, kind = _read_piece(_message(value, path, "pieces"), path, len(tokens))
            tokens.append(token)
            scores.append(score)
            types.append(kind)
        elif number == _TRAINER:
            trainer = dict(_fields(_message(value, path, "trainer_spec"), path, "trainer_spec"))
        elif number == _NORMALIZER:
            normalizer = dict(_fields(_message(value, path, "normalizer_spec"), path, "normalizer_spec"))
    _check(path, tokens, trainer, normalizer)
    kinds = np.array(types, np.int32)
    unknown = np.flatnonzero(kinds == UNKNOWN)
    return SentencePieceVocab(
        path=path,
        tokens=tokens,
        scores=np.array(scores, np.float64),
        types=kinds,
        unknown=tokens[unknown[0]] if len(unknown) else None,
        add_space=normalizer.get(_DUMMY_PREFIX, 1) == 1,
    )


def _check(
    path: Path,
    tokens: list[str],
    trainer: dict[int, int | memoryview],
    normalizer: dict[int, int | memoryview],
) -> None:
    if not tokens:
        raise FormatError(path, "pieces", "missing: the file holds no vocabulary")
    remedy = (
        "save the fast tokenizer with transformers, `AutoTokenizer.from_pretrained(SRC).save_pretrained(DST)`"
    )
    if trainer.get(_MODEL_TYPE) != _BPE:
        raise FormatError(path, "trainer_spec.model_type", f"only BPE vocabularies are read: {remedy}")
    charsmap = normalizer.get(_CHARSMAP)
    if isinstance(charsmap, memoryview) and len(charsmap):
        raise FormatError(path, "normalizer_spec.precompiled_charsmap", f"is not supported: {remedy}")
    if normalizer.get(_EXTRA_SPACES, 1) != 0:
        raise FormatError(
            path, "normalizer_spec.remove_extra_whitespaces", f"true is not supported: {remedy}"
        )


def _read_piece(data: memoryview, path: Path, index: int) -> tuple[str, float, int]:
    found = dict(_fields(data, path, f"pieces[{index}]"))
    piece, score, kind = found.get(_PIECE), found.get(_SCORE, 0), found.get(_TYPE, NORMAL)
    try:
        token = str(piece, "utf-8") if isinstance(piece, memoryview) else ""
    except UnicodeDecodeError:
        token = ""
    if not token or not isinstance(score, int) or not isinstance(kind, int) or not 1 <= kind <= 6:
        raise FormatError(
            path, f"pieces[{index}]", "expected a text, a score and a type: the file is damaged"
        )
    (number,) = struct.unpack("<f", struct.pack("<I", score & 0xFFFFFFFF))
    if not np.isfinite(number):
        raise FormatError(path, f"pieces[{index}].score", f"{number} is not finite")
    return token, number, kind


def _message(value: int | memoryview, path: Path, field: str) -> memoryview:
    if not isinstance(value, memoryview):
        raise FormatError(path, field, "a number where a message is expected: this is no SentencePiece model")
    return value


def _fields(data: memoryview, path: Path, where: str) -> Iterator[_Field]:
    """Walk the fields of a message; a fixed32 comes as its integer."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at, path, where)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at, path, where)
            yield _Field(number, value)
            continue
        if wire == 2:
            length, at = _varint(data, at, path, where)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise FormatError(path, where, f"wire type {wire} at {at}: this is no SentencePiece model")
        if length > len(data) - at:
            raise FormatError(
                path, where, f"asks for {length} bytes at {at}, {len(data) - at} are left: cut off"
            )
        raw = data[at : at + length]
        at += length
        yield _Field(number, raw if wire == 2 else int.from_bytes(raw, "little"))


def _varint(data: memoryview, at: int, path: Path, where: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise FormatError(
        path, where, f"a broken number at {at}: this is no SentencePiece model, or it is cut off"
    )
