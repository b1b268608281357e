"""The tokenizer and chat template of a Hugging Face folder: ``tokenizer.json`` and its companions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Engine
from tokenizers import models, pre_tokenizers

from kairox_jax.io.errors import FormatError
from kairox_jax.io.json_file import read_json
from kairox_jax.io.sentencepiece_file import read_sentencepiece
from kairox_jax.io.sentencepiece_vocab import CONTROL, USER, SentencePieceVocab, build_engine, special_ids
from kairox_jax.io.tokenizer import END_OF_TURN, Tokenizer, byte_alphabet, byte_level_piece

_GPT2_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def hf_tokenizer(folder: Path, *, bos_id: int | None, eos_ids: tuple[int, ...], add_bos: bool) -> Tokenizer:
    """Build the tokenizer of a folder from its ``tokenizer.json``.

    Args:
        folder: of the checkpoint.
        bos_id, eos_ids: what ``config.json`` says.
        add_bos: put BOS first by default, as ``adds_bos`` found.

    Raises:
        FormatError: there is no ``tokenizer.json``, or it is broken or of an unsupported kind.
    """
    path = folder / "tokenizer.json"
    if not path.is_file() and (folder / "merges.txt").is_file():
        return _gpt2_tokenizer(folder, bos_id=bos_id, eos_ids=eos_ids, add_bos=add_bos)
    if not path.is_file() and (folder / "tokenizer.model").is_file():
        return _sentencepiece_tokenizer(folder, bos_id=bos_id, eos_ids=eos_ids, add_bos=add_bos)
    if not path.is_file():
        raise FormatError(
            path,
            "tokenizer.json",
            "missing: save the fast tokenizer with transformers, "
            "`AutoTokenizer.from_pretrained(SRC).save_pretrained(DST)`",
        )
    values = read_json(path)
    try:
        engine = Engine.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise FormatError(path, "tokenizer.json", f"cannot be read: {error}") from None
    as_bytes, strip = _byte_rule(values, path)
    return _wrap(
        engine, path, as_bytes, bos_id=bos_id, eos_ids=eos_ids, add_bos=add_bos, strip_first_space=strip
    )


def _wrap(
    engine: Engine,
    path: Path,
    as_bytes: Callable[[str], bytes],
    *,
    bos_id: int | None,
    eos_ids: tuple[int, ...],
    add_bos: bool,
    strip_first_space: bool,
) -> Tokenizer:
    added = engine.get_added_tokens_decoder()
    special = frozenset(i for i, token in added.items() if token.special)
    user = {i: token.content for i, token in added.items() if not token.special}
    vocab = {i: token for token, i in engine.get_vocab(with_added_tokens=True).items()}
    if max(vocab) >= 2 * len(vocab) + 1024:
        raise FormatError(path, "vocab", f"the largest id is {max(vocab)}, with {len(vocab)} tokens")
    pieces = [
        b"" if i in special or i not in vocab else user[i].encode() if i in user else as_bytes(vocab[i])
        for i in range(max(vocab) + 1)
    ]
    ends = [i for i in sorted(special) if added[i].content in END_OF_TURN]
    return Tokenizer(
        engine,
        pieces,
        special=special,
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys([*eos_ids, *ends])),
        add_bos=add_bos and bos_id is not None,
        strip_first_space=strip_first_space,
    )


def _gpt2_tokenizer(
    folder: Path, *, bos_id: int | None, eos_ids: tuple[int, ...], add_bos: bool
) -> Tokenizer:
    """Build GPT-2's tokenizer from ``vocab.json`` and ``merges.txt``, as OPT's repositories hold it."""
    path = folder / "vocab.json"
    vocab = read_json(path) if path.is_file() else {}
    if not vocab or any(type(i) is not int or not 0 <= i < 2**31 for i in vocab.values()):
        raise FormatError(path, "vocab.json", "missing or broken: expected tokens and their ids")
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges: list[tuple[str, str]] = []
    for line in lines:
        if line and not line.startswith("#version"):
            left, _, right = line.partition(" ")
            if not {left, right, left + right} <= vocab.keys():
                raise FormatError(folder / "merges.txt", line, "does not join two tokens into a third")
            merges.append((left, right))
    engine = Engine(models.BPE(vocab=vocab, merges=merges))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.add_special_tokens([token for token in _GPT2_SPECIAL if token in vocab])
    return _wrap(
        engine,
        path,
        partial(byte_level_piece, alphabet=byte_alphabet()),
        bos_id=bos_id,
        eos_ids=eos_ids,
        add_bos=add_bos,
        strip_first_space=False,
    )


def sentencepiece_vocab(folder: Path) -> SentencePieceVocab:
    """Read SentencePiece's own file, ``tokenizer.model``, and the tokens that were added to it.

    Raises:
        FormatError: it is broken, or the added tokens do not follow its own.
    """
    vocab = read_sentencepiece(folder / "tokenizer.model")
    added = _added_tokens(folder, len(vocab.tokens))
    kinds = [CONTROL if special else USER for _, special in added]
    return replace(
        vocab,
        tokens=[*vocab.tokens, *(token for token, _ in added)],
        scores=np.append(vocab.scores, np.zeros(len(added))),
        types=np.append(vocab.types, np.array(kinds, np.int32)),
    )


def _sentencepiece_tokenizer(
    folder: Path, *, bos_id: int | None, eos_ids: tuple[int, ...], add_bos: bool
) -> Tokenizer:
    """Build the tokenizer of SentencePiece's own file and of the tokens that were added to it."""
    vocab = sentencepiece_vocab(folder)
    engine, pieces = build_engine(vocab)
    ends = [i for i in np.flatnonzero(vocab.types == CONTROL).tolist() if vocab.tokens[i] in END_OF_TURN]
    return Tokenizer(
        engine,
        pieces,
        special=special_ids(vocab.types),
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys([*eos_ids, *ends])),
        add_bos=add_bos and bos_id is not None,
        strip_first_space=vocab.add_space,
    )


def _added_tokens(folder: Path, first: int) -> list[tuple[str, bool]]:
    """List the tokens after the vocabulary, and whether each is special."""
    settings, plain = folder / "tokenizer_config.json", folder / "added_tokens.json"
    found: dict[int, tuple[str, bool]] = {}
    if plain.is_file():
        found = {i: (token, False) for token, i in read_json(plain).items() if isinstance(i, int)}
    entries = read_json(settings).get("added_tokens_decoder") if settings.is_file() else None
    for key, entry in (entries if isinstance(entries, dict) else {}).items():
        if not key.isdecimal() or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise FormatError(settings, f"added_tokens_decoder.{key[:40]}", "expected an id and its content")
        found[int(key)] = (entry["content"], bool(entry.get("special")))
    found = {i: token for i, token in found.items() if i >= first}
    if sorted(found) != list(range(first, first + len(found))):
        raise FormatError(
            settings if entries else plain,
            "added tokens",
            f"their ids do not follow the {first} of tokenizer.model",
        )
    return [found[i] for i in sorted(found)]


def _byte_rule(values: dict[str, Any], path: Path) -> tuple[Callable[[str], bytes], bool]:
    """Return how a token becomes bytes, and whether a text's first space belongs to the tokenizer."""
    kinds = set(_types(values.get("decoder"))) | set(_types(values.get("pre_tokenizer")))
    if "ByteLevel" in kinds:
        return partial(byte_level_piece, alphabet=byte_alphabet()), False
    model = values.get("model")
    if isinstance(model, dict) and (model.get("byte_fallback") or "Metaspace" in kinds):
        return _sentence_piece, "Strip" in kinds or "Metaspace" in kinds
    raise FormatError(
        path, "decoder", f"{sorted(kinds)} is not supported; expected byte-level or SentencePiece BPE"
    )


def _sentence_piece(token: str) -> bytes:
    match = _BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("\u2581", " ").encode()


def _types(part: Any) -> list[str]:
    """List the types of a component and of those nested in it."""
    if isinstance(part, list):
        return [kind for item in part for kind in _types(item)]
    if not isinstance(part, dict):
        return []
    nested = [part.get(key) for key in ("decoders", "pretokenizers", "processors")]
    return [str(part.get("type")), *_types([item for item in nested if item])]


def adds_bos(folder: Path) -> bool:
    """Say whether the folder's tokenizer begins a text with BOS."""
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        value = read_json(settings).get("add_bos_token")
        if isinstance(value, bool):
            return value
    path = folder / "tokenizer.json"
    if not path.is_file():
        return (folder / "tokenizer.model").is_file()  # LlamaTokenizer does unless told otherwise
    return _template_begins_special(read_json(path).get("post_processor"))


def _template_begins_special(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    if part.get("type") == "Sequence":
        return any(_template_begins_special(item) for item in part.get("processors") or [])
    single = part.get("single")
    first = (
        single[0] if part.get("type") == "TemplateProcessing" and isinstance(single, list) and single else {}
    )
    return isinstance(first, dict) and "SpecialToken" in first


def hf_chat_template(folder: Path) -> str | None:
    """Return the folder's chat template: of its own file, or of ``tokenizer_config.json``."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    template = read_json(settings).get("chat_template") if settings.is_file() else None
    if isinstance(template, list):  # several named ones
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
