"""SentencePiece BPE vocabularies, of GGUF files and of ``tokenizer.model``, as merges by score."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as Engine

from kairox_jax.io.errors import FormatError

SPACE = "\u2581"
# Kinds of tokens, the same numbers in both files.
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, kw_only=True)
class SentencePieceVocab:
    """A vocabulary.

    Attributes:
        path: the file, for errors.
        tokens: one text a token, all different.
        scores: float [V]; a union of two neighbours with a better score is made first.
        types: int [V], the kinds above.
        unknown: the token for what has none, or None.
        add_space: a space is put before a text.
    """

    path: Path
    tokens: list[str]
    scores: Float[np.ndarray, " V"]
    types: Int[np.ndarray, " V"]
    unknown: str | None
    add_space: bool


def build_engine(vocab: SentencePieceVocab) -> tuple[Engine, list[bytes]]:
    """Build the library's tokenizer of a vocabulary, and the bytes that each token stands for.

    SentencePiece joins the neighbours whose union has the best score, the leftmost of equal ones; the same is
    a list of merges in the order of their result's score. A word without token falls back to its bytes.
    Control tokens and those of the user are parsed in the text.

    Raises:
        FormatError: a token occurs twice, or bytes are broken.

    Source: llama.cpp, ``llm_tokenizer_spm``; transformers, ``SentencePieceExtractor``, for the list of merges.
    """
    ids = {token: i for i, token in enumerate(vocab.tokens)}
    if len(ids) != len(vocab.tokens):
        raise FormatError(vocab.path, "tokens", "a token occurs twice")
    pieces = [
        _piece(vocab.path, token, int(kind)) for token, kind in zip(vocab.tokens, vocab.types, strict=True)
    ]
    byte_tokens = {vocab.tokens[i] for i in np.flatnonzero(vocab.types == BYTE)}
    fallback = {f"<0x{byte:02X}>" for byte in range(256)} <= byte_tokens
    if not fallback and vocab.unknown is None:
        raise FormatError(vocab.path, "tokens", "neither all bytes <0x00>...<0xFF> nor an unknown token")
    engine = Engine(
        models.BPE(
            vocab=ids,
            merges=_merges(vocab, ids),
            unk_token=vocab.unknown,
            fuse_unk=True,
            byte_fallback=fallback,
        )
    )
    escape = normalizers.Replace(" ", SPACE)
    prepend = normalizers.Sequence([normalizers.Prepend(SPACE), escape])
    engine.normalizer = prepend if vocab.add_space else escape
    special = [vocab.tokens[i] for i in np.flatnonzero(np.isin(vocab.types, (UNKNOWN, CONTROL)))]
    user = [vocab.tokens[i] for i in np.flatnonzero(vocab.types == USER)]
    engine.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    engine.add_tokens([AddedToken(token, normalized=False) for token in user])
    return engine, pieces


def special_ids(types: Int[np.ndarray, " V"]) -> frozenset[int]:
    """List the tokens that stand for no text."""
    return frozenset(np.flatnonzero(np.isin(types, (UNKNOWN, CONTROL))).tolist())


def _piece(path: Path, token: str, kind: int) -> bytes:
    if kind in (UNKNOWN, CONTROL):
        return b""
    if kind == USER:
        return token.encode()
    if kind != BYTE:
        return token.replace(SPACE, " ").encode()
    match = _BYTE_TOKEN.fullmatch(token)
    if match is None:
        raise FormatError(path, "tokens", f"{token[:80]!r} is no byte such as <0x0A>")
    return bytes([int(match[1], 16)])


def _merges(vocab: SentencePieceVocab, ids: dict[str, int]) -> list[tuple[str, str]]:
    """List every pair of tokens that makes a third, the best scored result first."""
    joinable = np.isin(vocab.types, (NORMAL, UNUSED))
    parts = {token for token, i in ids.items() if joinable[i]}
    merges: list[tuple[str, str]] = []
    for i in np.argsort(-vocab.scores, kind="stable").tolist():
        token = vocab.tokens[i]
        if token not in parts:
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        found = [pair for pair in pairs if pair[0] in parts and pair[1] in parts]
        merges += sorted(found, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges
