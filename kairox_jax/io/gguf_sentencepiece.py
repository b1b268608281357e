"""SentencePiece BPE vocabularies of GGUF files (``tokenizer.ggml.model`` llama), as merges by score."""

from __future__ import annotations

import re

import numpy as np
from tokenizers import Tokenizer as Engine
from tokenizers import models, normalizers

from kairox_jax.io.errors import FormatError
from kairox_jax.io.gguf_fields import get_field
from kairox_jax.io.gguf_file import GgufFile

SPACE = "\u2581"
# GGUF token types.
_NORMAL, _UNKNOWN, _UNUSED, _BYTE = 1, 2, 5, 6
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def sentencepiece_engine(
    file: GgufFile, vocab: dict[str, int], types: np.ndarray
) -> tuple[Engine, list[bytes], bool]:
    """Build the engine of a SentencePiece BPE vocabulary.

    SentencePiece joins the neighbours whose union has the best score, the leftmost of equal ones; the same is
    a list of merges in the order of their result's score. A word without token falls back to its bytes.

    Args:
        file: an open file.
        vocab: its tokens and their ids.
        types: a GGUF token type for each.

    Returns:
        The engine; the bytes of each token; whether it puts a space before a text.

    Raises:
        FormatError: scores or bytes are missing or broken, or a setting is not supported.

    Source: llama.cpp, ``llm_tokenizer_spm``; transformers, ``SentencePieceExtractor``, for the list of merges.
    """
    if get_field(file, "tokenizer.ggml.remove_extra_whitespaces", bool, False):
        raise FormatError(
            file.path, "tokenizer.ggml.remove_extra_whitespaces", "true is not supported for this vocabulary"
        )
    tokens = list(vocab)
    pieces = [_piece(file, token, int(kind)) for token, kind in zip(tokens, types, strict=True)]
    byte_tokens = {tokens[i] for i in np.flatnonzero(types == _BYTE)}
    fallback = {f"<0x{byte:02X}>" for byte in range(256)} <= byte_tokens
    unknown = _unknown_token(file, tokens, types)
    if not fallback and unknown is None:
        raise FormatError(
            file.path, "tokenizer.ggml.tokens", "neither all bytes <0x00>...<0xFF> nor an unknown token"
        )
    merges = _merges(vocab, _scores(file, len(tokens)), types)
    engine = Engine(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=fallback)
    )
    add_space = get_field(file, "tokenizer.ggml.add_space_prefix", bool, True)
    escape = normalizers.Replace(" ", SPACE)
    engine.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escape]) if add_space else escape
    return engine, pieces, add_space


def _piece(file: GgufFile, token: str, kind: int) -> bytes:
    if kind != _BYTE:
        return token.replace(SPACE, " ").encode()
    match = _BYTE_TOKEN.fullmatch(token)
    if match is None:
        raise FormatError(file.path, "tokenizer.ggml.tokens", f"{token[:80]!r} is no byte such as <0x0A>")
    return bytes([int(match[1], 16)])


def _unknown_token(file: GgufFile, tokens: list[str], types: np.ndarray) -> str | None:
    key = "tokenizer.ggml.unknown_token_id"
    index = get_field(file, key, int, 0)
    if not 0 <= index < len(tokens):
        raise FormatError(file.path, key, f"{index} is no id of the {len(tokens)} tokens")
    return tokens[index] if key in file.fields or types[index] == _UNKNOWN else None


def _scores(file: GgufFile, count: int) -> np.ndarray:
    key = "tokenizer.ggml.scores"
    scores = file.fields.get(key)
    if not isinstance(scores, np.ndarray) or scores.shape != (count,) or scores.dtype.kind != "f":
        raise FormatError(file.path, key, f"missing or broken; expected {count} numbers, one per token")
    if not np.isfinite(scores).all():
        raise FormatError(file.path, key, "holds a NaN or an infinity")
    return scores


def _merges(vocab: dict[str, int], scores: np.ndarray, types: np.ndarray) -> list[tuple[str, str]]:
    """List every pair of tokens that makes a third, the best scored result first."""
    joinable = np.isin(types, (_NORMAL, _UNUSED))
    tokens = list(vocab)
    parts = {token for token, i in vocab.items() if joinable[i]}
    merges: list[tuple[str, str]] = []
    for i in np.argsort(-scores, kind="stable").tolist():
        token = tokens[i]
        if token not in parts:
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        found = [pair for pair in pairs if pair[0] in parts and pair[1] in parts]
        merges += sorted(found, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return merges
