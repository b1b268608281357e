"""Tokenizers of Hugging Face folders: byte-level and SentencePiece, built here with the library."""

import json
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from kairox_jax.io import FormatError
from kairox_jax.io.hf_tokenizer import adds_bos, hf_chat_template, hf_tokenizer

DECODER = '{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}'
TEXTS = ["Hello world", "ab  12\n\tx", "naïve café 🦜!", " leading", "", "<|im_end|>"]


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    """A folder with a byte-level tokenizer.json that puts <s> first."""
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    engine.train_from_iterator(["Hello world hello"] * 9, trainer)
    engine.add_special_tokens(["<|im_end|>"])
    engine.add_tokens([AddedToken("<tool>", normalized=False)])
    engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    engine.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def sentence_piece(tmp_path: Path) -> Path:
    """A folder with a tokenizer.json in the manner of Llama 2."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    for piece in ["\u2581", *"Helowrdabx", "ll", "\u2581w", "He"]:
        vocab[piece] = len(vocab)
    engine = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[("l", "l"), ("\u2581", "w"), ("H", "e")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    engine.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    engine.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    engine.add_special_tokens(["<unk>", "<s>", "</s>"])
    engine.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_as_the_library(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    engine = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = hf_tokenizer(folder, bos_id=0, eos_ids=(1,), add_bos=False)
    assert ours.vocab_size == engine.get_vocab_size()
    for text in TEXTS:
        ids = engine.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == engine.decode(ids, skip_special_tokens=True)


def test_special_tokens(byte_level: Path) -> None:
    tokenizer = hf_tokenizer(byte_level, bos_id=0, eos_ids=(1,), add_bos=adds_bos(byte_level))
    (end,), (tool,) = tokenizer.encode("<|im_end|>", add_bos=False), tokenizer.encode("<tool>", add_bos=False)
    assert tokenizer.eos_ids == (1, end)
    assert tokenizer.is_special(end) and tokenizer.token_bytes(end) == b""
    assert not tokenizer.is_special(tool) and tokenizer.token_bytes(tool) == b"<tool>"
    assert tokenizer.encode("Hello")[0] == 0 and tokenizer.encode("<s>Hello").count(0) == 1


def test_bytes_of_pieces(sentence_piece: Path) -> None:
    tokenizer = hf_tokenizer(sentence_piece, bos_id=1, eos_ids=(2,), add_bos=False)
    ids = tokenizer.encode("Hello w\u00e9")
    assert b"".join(map(tokenizer.token_bytes, ids)) == " Hello w\u00e9".encode()
    assert tokenizer.decode(ids) == "Hello w\u00e9"


def test_who_adds_bos(byte_level: Path) -> None:
    assert adds_bos(byte_level)
    (byte_level / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert not adds_bos(byte_level)
    (byte_level / "tokenizer_config.json").write_text("{}")
    values = json.loads((byte_level / "tokenizer.json").read_text())
    values["post_processor"] = {"type": "Sequence", "processors": [values["post_processor"]]}
    (byte_level / "tokenizer.json").write_text(json.dumps(values))
    assert adds_bos(byte_level)
    values["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
    (byte_level / "tokenizer.json").write_text(json.dumps(values))
    assert not adds_bos(byte_level)
    assert not adds_bos(byte_level / "nothing")


def test_chat_template(tmp_path: Path) -> None:
    assert hf_chat_template(tmp_path) is None
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text('{"chat_template": "one"}')
    assert hf_chat_template(tmp_path) == "one"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "two"}]
    settings.write_text(json.dumps({"chat_template": named}))
    assert hf_chat_template(tmp_path) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert hf_chat_template(tmp_path) == "three"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "tokenizer.json: missing: save the fast tokenizer"),
        ("{", "JSON: broken"),
        ("{}", "cannot be read"),
        (
            '{"model": {"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}, '
            + f'"decoder": {DECODER}}}',
            "largest id is 4000000000",
        ),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', "decoder: .* is not supported"),
    ],
)
def test_refuses(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(FormatError, match=message):
        hf_tokenizer(tmp_path, bos_id=None, eos_ids=(), add_bos=False)


def test_vocabulary_and_merges(byte_level: Path) -> None:
    """The two files that OPT's repositories hold give what tokenizer.json gives."""
    values = json.loads((byte_level / "tokenizer.json").read_text())["model"]
    want = hf_tokenizer(byte_level, bos_id=0, eos_ids=(1,), add_bos=True)
    (byte_level / "tokenizer.json").unlink()
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in values["merges"]]
    (byte_level / "vocab.json").write_text(json.dumps(values["vocab"]))
    (byte_level / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    got = hf_tokenizer(byte_level, bos_id=0, eos_ids=(1,), add_bos=True)
    for text in TEXTS[:-1]:
        assert got.encode(text) == want.encode(text)
        assert got.decode(got.encode(text)) == text
    assert got.is_special(1) and got.encode("</s>", add_bos=False) == [1]
    (byte_level / "merges.txt").write_text("x yz\n")
    with pytest.raises(FormatError, match="merges.txt: x yz: does not join"):
        hf_tokenizer(byte_level, bos_id=0, eos_ids=(1,), add_bos=True)
