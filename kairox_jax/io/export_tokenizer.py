"""A checkpoint's tokenizer as GGUF metadata, checked by rebuilding it from there.

GGUF names the way a text is cut into words instead of describing it; the name is found by trying each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kairox_jax.io.checkpoint import Checkpoint
from kairox_jax.io.errors import FormatError
from kairox_jax.io.gguf_file import GgufFile
from kairox_jax.io.gguf_tokenizer import gguf_tokenizer
from kairox_jax.io.hf_tokenizer import sentencepiece_vocab
from kairox_jax.io.json_file import read_json
from kairox_jax.io.tokenizer import Tokenizer
from kairox_jax.io.tokenizer_files import MetadataWriter, has_tokenizer

_KINDS = ("smollm", "llama-bpe", "qwen2", "gpt-2", "falcon", "default")
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_SPACE = "\u2581"
# Texts in which the known ways of cutting words differ: digits, contractions, spaces, scripts, line ends.
_PROBE = (
    "Hello, World's end: it'S 1234567 x2+33.5=99!\n\n  two  spaces\tand tabs \r\n"
    "na\u00efve e\u0301 \u4f60\u597d\u4e16\u754c \U0001f680\U0001f680 don't we'll ...''\"\" <b>10,000</b> end ",
    "    def f(x):\n        return x[0]['key'] != 12345  # why\n\n\n",
    " leading, \u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439 100\u20ac",
)


def tokenizer_fields(checkpoint: Checkpoint, arch: str) -> dict[str, Any]:
    """Return the ``tokenizer.*`` metadata of a checkpoint, as many tokens as the embedding has rows.

    Raises:
        ValueError: GGUF has no name for what this tokenizer does.
        FormatError: its files are broken.
    """
    path = checkpoint.tokenizer_path
    if path is not None and path.is_file():
        fields = GgufFile(path).fields
        found = {key: value for key, value in fields.items() if key.startswith("tokenizer.")}
        if "tokenizer.ggml.tokens" in found:
            return found
    if path is None or path.is_file() or not has_tokenizer(path):
        return {"tokenizer.ggml.model": "no_vocab", f"{arch}.vocab_size": checkpoint.config.vocab_size}
    original = checkpoint.tokenizer()
    own = ("tokenizer.json", "merges.txt")  # the order in which a folder's tokenizer is looked for
    described = any((path / name).is_file() for name in own)
    base = _vocabulary(path, checkpoint) if described else _sentencepiece(path, checkpoint)
    for kind in _candidates(base):
        fields = base | kind
        if _rebuilds(fields, original, arch):
            return fields
    raise ValueError(
        f"{path}: GGUF has no name for the way this tokenizer cuts text: convert to Orbax, which keeps its files"
    )


def _candidates(base: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if "tokenizer.ggml.merges" in base:
        yield from ({"tokenizer.ggml.pre": kind} for kind in _KINDS)
    else:
        yield from ({"tokenizer.ggml.add_space_prefix": value} for value in (True, False))


def _rebuilds(fields: Mapping[str, Any], original: Tokenizer, arch: str) -> bool:
    """Say whether the tokenizer that is read back from the metadata does what the original does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "vocabulary.gguf")
        writer = MetadataWriter(path, arch)
        writer.add_fields(fields)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        try:
            rebuilt = gguf_tokenizer(GgufFile(path))
        except FormatError:
            return False
    probes = [original.encode(text, add_bos=False) for text in _PROBE]
    return all(
        rebuilt.encode(text, add_bos=False) == ids and rebuilt.decode(ids) == original.decode(ids)
        for text, ids in zip(_PROBE, probes, strict=True)
    )


def _vocabulary(folder: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    vocab, merges, added = _read_files(folder)
    count, config = checkpoint.config.vocab_size, checkpoint.config
    if max([*vocab.values(), *added]) >= count:
        raise FormatError(folder, "tokenizer.json", f"has ids beyond the {count} rows of the embedding")
    byte_level = not any(token.startswith(_SPACE) for token in vocab)
    tokens, types = [f"[PAD{i}]" for i in range(count)], np.full(count, _UNUSED, np.int32)
    for token, i in vocab.items():
        tokens[i], types[i] = token, _NORMAL
        if not byte_level and len(token) == 6 and token.startswith("<0x"):
            types[i] = _BYTE
    for i, (content, special) in added.items():
        tokens[i], types[i] = content, _CONTROL if special else _USER
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2" if byte_level else "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_bos_token": config.add_bos,
    }
    if byte_level:
        fields["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    else:
        fields["tokenizer.ggml.scores"] = _scores(tokens, merges)
        if "<unk>" in vocab:
            fields["tokenizer.ggml.unknown_token_id"] = vocab["<unk>"]
            types[vocab["<unk>"]] = _UNKNOWN
    return fields | _named_tokens(checkpoint)


def _sentencepiece(folder: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the vocabulary of a folder that has SentencePiece's own file alone."""
    vocab, count = sentencepiece_vocab(folder), checkpoint.config.vocab_size
    missing = count - len(vocab.tokens)
    if missing < 0:
        raise FormatError(
            folder / "tokenizer.model", "pieces", f"more than the {count} rows of the embedding"
        )
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*vocab.tokens, *(f"[PAD{i}]" for i in range(len(vocab.tokens), count))],
        "tokenizer.ggml.token_type": np.append(vocab.types, np.full(missing, _UNUSED)).astype(np.int32),
        "tokenizer.ggml.scores": np.append(vocab.scores, np.full(missing, -1e9)).astype(np.float32),
        "tokenizer.ggml.add_bos_token": checkpoint.config.add_bos,
    }
    if vocab.unknown is not None:
        fields["tokenizer.ggml.unknown_token_id"] = vocab.tokens.index(vocab.unknown)
    return fields | _named_tokens(checkpoint)


def _named_tokens(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    named = zip(("eos", "eot", "eom"), config.eos_ids, strict=False)
    fields: dict[str, Any] = {f"tokenizer.ggml.{name}_token_id": i for name, i in named}
    if config.bos_id is not None:
        fields["tokenizer.ggml.bos_token_id"] = config.bos_id
    if checkpoint.chat_template is not None:
        fields["tokenizer.chat_template"] = checkpoint.chat_template
    return fields


def _read_files(
    folder: Path,
) -> tuple[dict[str, int], list[tuple[str, str]], dict[int, tuple[str, bool]]]:
    """Return tokens and their ids, merges in order, and added tokens: id -> (text, is it special)."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        vocab = read_json(folder / "vocab.json")
        lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
        pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
        special = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>")
        added = {vocab[token]: (token, True) for token in special if token in vocab}
        return vocab, [(left, right) for left, right in pairs], added
    values = read_json(path)
    model = values.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        raise FormatError(path, "model.type", "only BPE can be written to GGUF: convert to Orbax")
    merges = [_pair(merge, path) for merge in model["merges"]]
    added = {
        token["id"]: (token["content"], bool(token["special"])) for token in values.get("added_tokens", [])
    }
    return model["vocab"], merges, added


def _pair(merge: Any, path: Path) -> tuple[str, str]:
    """Read a merge in the old spelling ("a b") or the new one (["a", "b"])."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if len(parts) != 2:
        raise FormatError(path, "model.merges", f"{str(merge)[:80]!r} is no pair of tokens")
    return str(parts[0]), str(parts[1])


def _scores(tokens: list[str], merges: list[tuple[str, str]]) -> np.ndarray:
    """Return scores that order the merges as they are: the earlier the merge, the higher its result's score."""
    rank: dict[str, int] = {}
    for place, pair in enumerate(merges):
        rank.setdefault("".join(pair), place)
    least = len(merges)
    return np.array([-float(rank.get(token, least)) for token in tokens], np.float32)
