"""The tokenizer of a GGUF file, rebuilt from its vocabulary: byte-level BPE here, SentencePiece beside."""

from __future__ import annotations

import numpy as np
from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as Engine

from kairox_jax.io.errors import FormatError
from kairox_jax.io.gguf_file import GgufFile
from kairox_jax.io.gguf_header import StringArray
from kairox_jax.io.gguf_pretokenizer import LLAMA_BPE, QWEN2, build_pre_tokenizer, pre_tokenizer_kind
from kairox_jax.io.gguf_sentencepiece import read_vocab
from kairox_jax.io.sentencepiece_vocab import CONTROL, USER, build_engine, special_ids
from kairox_jax.io.tokenizer import END_OF_TURN, Tokenizer, byte_alphabet, byte_level_piece

# Ids that SentencePiece files mean where they name none (llama.cpp).
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2}


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Rebuild the tokenizer of a GGUF file.

    Raises:
        FormatError: the vocabulary is missing or broken, or of a kind that is not supported.
    """
    kind = file.fields.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise FormatError(
            file.path,
            "tokenizer.ggml.model",
            f"{str(kind)[:80]!r} is not supported; expected 'gpt2' (byte-level BPE) or 'llama' (SentencePiece "
            "BPE): use the model's safetensors folder, whose tokenizer.json can be read",
        )
    tokens, types = list(_strings(file, "tokenizer.ggml.tokens")), _token_types(file)
    if kind == "llama":
        vocab = read_vocab(file, tokens, types)
        engine, pieces = build_engine(vocab)
        strip = vocab.add_space
    else:
        (engine, pieces), strip = _byte_level(file, tokens, types), False
    return Tokenizer(
        engine,
        pieces,
        special=special_ids(types),
        bos_id=bos_token_id(file),
        eos_ids=end_token_ids(file),
        add_bos=gguf_adds_bos(file),
        strip_first_space=strip,
    )


def gguf_adds_bos(file: GgufFile) -> bool:
    """Say whether the file's tokenizer puts a BOS before a text."""
    default = file.fields.get("tokenizer.ggml.pre") in LLAMA_BPE or _is_sentencepiece(file)
    value = file.fields.get("tokenizer.ggml.add_bos_token", default)
    if not isinstance(value, bool):
        raise FormatError(
            file.path, "tokenizer.ggml.add_bos_token", f"{str(value)[:80]!r} is not true or false"
        )
    return value and bos_token_id(file) is not None


def bos_token_id(file: GgufFile) -> int | None:
    """Return the token that begins a text, or None."""
    return _named_id(file, "bos")


def end_token_ids(file: GgufFile) -> tuple[int, ...]:
    """List the tokens at which generation ends: EOS first, then the ends of a turn."""
    ids = [i for name in ("eos", "eot", "eom") if (i := _named_id(file, name)) is not None]
    tokens = _strings(file, "tokenizer.ggml.tokens")
    control = np.flatnonzero(_token_types(file) == CONTROL).tolist()
    ids += [i for i in control if tokens[i] in END_OF_TURN]
    return tuple(dict.fromkeys(ids))


def _is_sentencepiece(file: GgufFile) -> bool:
    return file.fields.get("tokenizer.ggml.model") == "llama"


def _named_id(file: GgufFile, name: str) -> int | None:
    key, count = f"tokenizer.ggml.{name}_token_id", len(_strings(file, "tokenizer.ggml.tokens"))
    default = _SENTENCEPIECE_IDS.get(name) if _is_sentencepiece(file) else None
    value = file.fields.get(key, default)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise FormatError(file.path, key, f"{value!r:.80} is no id of the {count} tokens")
    return value


def _strings(file: GgufFile, key: str) -> StringArray:
    value = file.fields.get(key)
    if not isinstance(value, StringArray) or not len(value):
        raise FormatError(file.path, key, "missing or empty; expected an array of strings")
    return value


def _token_types(file: GgufFile) -> np.ndarray:
    key, count = "tokenizer.ggml.token_type", len(_strings(file, "tokenizer.ggml.tokens"))
    types = file.fields.get(key)
    if types is None:
        return np.ones(count, np.int32)
    if not isinstance(types, np.ndarray) or types.shape != (count,) or types.dtype.kind not in "iu":
        raise FormatError(file.path, key, f"expected {count} whole numbers, one per token")
    return types


def _byte_level(file: GgufFile, tokens: list[str], types: np.ndarray) -> tuple[Engine, list[bytes]]:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise FormatError(file.path, "tokenizer.ggml.tokens", "a token occurs twice")
    pre = pre_tokenizer_kind(file)
    engine = Engine(models.BPE(vocab=vocab, merges=_merges(file, vocab), ignore_merges=pre in LLAMA_BPE))
    engine.pre_tokenizer = build_pre_tokenizer(pre)
    if pre in QWEN2:
        engine.normalizer = normalizers.NFC()
    special = special_ids(types)
    user = np.flatnonzero(types == USER).tolist()
    engine.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in sorted(special)])
    engine.add_tokens([AddedToken(tokens[i], normalized=False) for i in user])
    alphabet = byte_alphabet()
    pieces = [b"" if i in special else byte_level_piece(token, alphabet) for i, token in enumerate(tokens)]
    for i in user:
        pieces[i] = tokens[i].encode()
    return engine, pieces


def _merges(file: GgufFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    key, merges = "tokenizer.ggml.merges", []
    for i, merge in enumerate(_strings(file, key)):
        # A piece may itself begin with the separator (llama.cpp searches from the second character).
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or not {left, right, left + right} <= vocab.keys():
            raise FormatError(
                file.path, f"{key}[{i}]", f"{merge[:80]!r} does not join two tokens into a third"
            )
        merges.append((left, right))
    return merges
