"""Text to token ids and back, rebuilt from a checkpoint's vocabulary with the ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from kairox_jax.io.errors import FormatError
from kairox_jax.io.gguf_file import GgufFile, StringArray

# GGUF token types.
_UNKNOWN, _CONTROL, _USER = 2, 3, 4
END_OF_TURN = frozenset(
    "<|im_end|> <|eot_id|> <|eom_id|> <|end_of_text|> <|endoftext|> <|end|> <|end_of_turn|> "
    "<end_of_turn>".split()
)
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA_BPE = ("llama-bpe", "llama3", "llama-v3")
_GPT2 = ("gpt-2", "default")


class Tokenizer:
    """A checkpoint's tokenizer."""

    def __init__(
        self,
        engine: Engine,
        pieces: Sequence[bytes],
        *,
        special: frozenset[int],
        bos_id: int | None,
        eos_ids: tuple[int, ...],
        add_bos: bool,
        strip_first_space: bool = False,
    ) -> None:
        """Wrap a ready engine.

        Args:
            engine: the library's tokenizer; parses special tokens in the text.
            pieces: the bytes that each token stands for; nothing for special tokens.
            special: ids of control tokens.
            bos_id: the token that begins a text, where the checkpoint names one.
            eos_ids: the tokens that end a text or a turn.
            add_bos: put ``bos_id`` first by default.
            strip_first_space: the space before a text's first word is the tokenizer's, not the text's.
        """
        self._engine = engine
        self._pieces = pieces
        self._special = special
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.add_bos = add_bos
        self._strip_first_space = strip_first_space

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self._pieces)

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Turn text into token ids; special tokens written in the text become their ids.

        Args:
            text: any text.
            add_bos: begin with ``bos_id``, unless the text already does; None does as the checkpoint says.

        Raises:
            ValueError: a BOS is asked for, but the checkpoint names none.
        """
        ids = self._engine.encode(text, add_special_tokens=False).ids
        if not (self.add_bos if add_bos is None else add_bos):
            return ids
        if self.bos_id is None:
            raise ValueError("add_bos: this checkpoint names no BOS token; pass add_bos=False")
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text: perhaps part of a character; b"" when special.

        Raises:
            ValueError: there is no such token.
        """
        if not 0 <= token_id < len(self._pieces):
            raise ValueError(f"token id {token_id} is not in [0, {len(self._pieces)})")
        return self._pieces[token_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Turn token ids into text; special tokens are left out, broken characters become U+FFFD."""
        text = b"".join(self.token_bytes(int(i)) for i in ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._strip_first_space else text

    def token_text(self, token_id: int | None) -> str:
        """Return a token as the vocabulary writes it, such as ``<|im_end|>``; "" for None (no such token)."""
        return "" if token_id is None else self._engine.id_to_token(token_id) or ""

    def is_special(self, token_id: int) -> bool:
        """Say whether the token is a control token, which stands for no text."""
        return token_id in self._special


@cache
def byte_alphabet() -> dict[str, int]:
    """Map each character of byte-level BPE to the byte it stands for.

    Source: ``bytes_to_unicode`` of GPT-2: printable bytes stand for themselves, the rest follow from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Rebuild the tokenizer of a GGUF file.

    Raises:
        FormatError: the vocabulary is missing or broken, or of a kind that is not supported.
    """
    kind = file.fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise FormatError(
            file.path,
            "tokenizer.ggml.model",
            f"{kind!r} is not supported; expected 'gpt2' (byte-level BPE): use the model's safetensors "
            "folder, whose tokenizer.json can be read",
        )
    tokens, types = list(_strings(file, "tokenizer.ggml.tokens")), _token_types(file)
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise FormatError(file.path, "tokenizer.ggml.tokens", "a token occurs twice")
    pre = file.fields.get("tokenizer.ggml.pre", "default")
    merges = _merges(file, vocab)
    engine = Engine(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA_BPE))
    engine.pre_tokenizer = _pre_tokenizer(file, pre)
    if pre == "qwen2":
        engine.normalizer = normalizers.NFC()
    special = frozenset(np.flatnonzero(np.isin(types, (_UNKNOWN, _CONTROL))).tolist())
    user = frozenset(np.flatnonzero(types == _USER).tolist())
    engine.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in sorted(special)])
    engine.add_tokens([AddedToken(tokens[i], normalized=False) for i in sorted(user)])
    alphabet = byte_alphabet()
    pieces = [
        b"" if i in special else token.encode() if i in user else byte_level_piece(token, alphabet)
        for i, token in enumerate(tokens)
    ]
    bos = file.fields.get("tokenizer.ggml.bos_token_id")
    return Tokenizer(
        engine,
        pieces,
        special=special,
        bos_id=None if bos is None else _token_id(file, "tokenizer.ggml.bos_token_id"),
        eos_ids=end_token_ids(file),
        add_bos=gguf_adds_bos(file),
    )


def gguf_adds_bos(file: GgufFile) -> bool:
    """Say whether the file's tokenizer puts a BOS before a text."""
    default = file.fields.get("tokenizer.ggml.pre") in _LLAMA_BPE or (
        file.fields.get("tokenizer.ggml.model") == "llama"
    )
    value = file.fields.get("tokenizer.ggml.add_bos_token", default)
    if not isinstance(value, bool):
        raise FormatError(file.path, "tokenizer.ggml.add_bos_token", f"{value!r} is not true or false")
    return value and "tokenizer.ggml.bos_token_id" in file.fields


def end_token_ids(file: GgufFile) -> tuple[int, ...]:
    """List the tokens at which generation ends: EOS first, then the ends of a turn."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = [_token_id(file, key) for key in keys if key in file.fields]
    tokens = _strings(file, "tokenizer.ggml.tokens")
    control = np.flatnonzero(_token_types(file) == _CONTROL).tolist()
    ids += [i for i in control if tokens[i] in END_OF_TURN]
    return tuple(dict.fromkeys(ids))


def _token_id(file: GgufFile, key: str) -> int:
    value, count = file.fields[key], len(_strings(file, "tokenizer.ggml.tokens"))
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise FormatError(file.path, key, f"{value!r} is no id of the {count} tokens")
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


def _merges(file: GgufFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    key, merges = "tokenizer.ggml.merges", []
    for i, merge in enumerate(_strings(file, key)):
        # A piece may itself begin with the separator (llama.cpp searches from the second character).
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or not {left, right, left + right} <= vocab.keys():
            raise FormatError(file.path, f"{key}[{i}]", f"{merge!r} does not join two tokens into a third")
        merges.append((left, right))
    return merges


def _pre_tokenizer(file: GgufFile, pre: object) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _GPT2:
        return byte_level
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre not in (*_LLAMA_BPE, "qwen2"):
        known = ", ".join((*_GPT2, "smollm", *_LLAMA_BPE, "qwen2"))
        raise FormatError(
            file.path, "tokenizer.ggml.pre", f"{pre!r} is not supported; expected one of {known}"
        )
    words = Regex(_WORDS % ("" if pre == "qwen2" else "{1,3}"))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_level_piece(token: str, alphabet: dict[str, int]) -> bytes:
    """Turn a byte-level token into its bytes; a token outside the alphabet stands for its own text."""
    codes = [alphabet.get(char, -1) for char in token]
    return token.encode() if -1 in codes else bytes(codes)
