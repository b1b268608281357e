"""The SentencePiece vocabulary of a GGUF file (``tokenizer.ggml.model`` llama)."""

from __future__ import annotations

import numpy as np

from kairox_jax.io.errors import FormatError
from kairox_jax.io.gguf_fields import get_field
from kairox_jax.io.gguf_file import GgufFile
from kairox_jax.io.sentencepiece_vocab import UNKNOWN, SentencePieceVocab


def read_vocab(file: GgufFile, tokens: list[str], types: np.ndarray) -> SentencePieceVocab:
    """Read scores and settings beside the tokens and their types.

    Raises:
        FormatError: scores are missing or broken, or a setting is not supported.
    """
    if get_field(file, "tokenizer.ggml.remove_extra_whitespaces", bool, False):
        raise FormatError(
            file.path, "tokenizer.ggml.remove_extra_whitespaces", "true is not supported for this vocabulary"
        )
    key = "tokenizer.ggml.unknown_token_id"
    unknown = get_field(file, key, int, 0)
    if not 0 <= unknown < len(tokens):
        raise FormatError(file.path, key, f"{unknown} is no id of the {len(tokens)} tokens")
    return SentencePieceVocab(
        path=file.path,
        tokens=tokens,
        scores=_scores(file, len(tokens)),
        types=types,
        unknown=tokens[unknown] if key in file.fields or types[unknown] == UNKNOWN else None,
        add_space=get_field(file, "tokenizer.ggml.add_space_prefix", bool, True),
    )


def _scores(file: GgufFile, count: int) -> np.ndarray:
    key = "tokenizer.ggml.scores"
    scores = file.fields.get(key)
    if not isinstance(scores, np.ndarray) or scores.shape != (count,) or scores.dtype.kind != "f":
        raise FormatError(file.path, key, f"missing or broken; expected {count} numbers, one per token")
    if not np.isfinite(scores).all():
        raise FormatError(file.path, key, "holds a NaN or an infinity")
    return scores
