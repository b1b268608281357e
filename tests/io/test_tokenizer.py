"""Token ids against the reference tokenizer's, and bytes against the text."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers

from kairox_jax.io import FormatError, Tokenizer, open_checkpoint
from kairox_jax.io.gguf_file import GgufFile
from kairox_jax.io.gguf_pretokenizer import pre_tokenizer_kind
from kairox_jax.io.tokenizer import byte_alphabet

CASES = json.loads(Path(__file__).parents[1].joinpath("data/smollm2_tokens.json").read_text())
Values = gguf.GGUFValueType


@pytest.fixture(scope="session")
def smollm2(default_model: Path) -> Tokenizer:
    return open_checkpoint(default_model).tokenizer()


@pytest.mark.model
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_ids_of_the_reference(case: dict, smollm2: Tokenizer) -> None:
    assert smollm2.encode(case["text"]) == case["ids"]


@pytest.fixture(scope="session")
def missing_bytes(smollm2: Tokenizer) -> frozenset[int]:
    """Bytes (of unassigned planes) that no token stands for; the reference drops them as well."""
    known = {smollm2.token_bytes(i) for i in range(smollm2.vocab_size)}
    return frozenset(byte for byte in range(256) if bytes([byte]) not in known)


@pytest.mark.model
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=80))
def test_round_trip(text: str, smollm2: Tokenizer, missing_bytes: frozenset[int]) -> None:
    assume(missing_bytes.isdisjoint(text.encode()))
    ids = smollm2.encode(text)
    assert b"".join(smollm2.token_bytes(i) for i in ids) == text.encode()
    assert smollm2.decode(ids) == text


@pytest.mark.model
def test_special_tokens(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_ids) == (49152, 1, (2, 0))
    assert smollm2.encode("<|im_start|>user\n") == [1, *smollm2.encode("user\n")]
    assert smollm2.token_bytes(2) == b"" and smollm2.is_special(2) and not smollm2.is_special(504)
    assert smollm2.decode([504, 2]) == "The"
    assert smollm2.token_text(2) == "<|im_end|>" and smollm2.token_text(None) == ""


@pytest.mark.model
def test_characters_over_several_tokens(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("🦜")
    assert len(ids) > 1
    assert all("\ufffd" in smollm2.decode([i]) for i in ids)
    assert smollm2.decode(ids) == "🦜"


def test_byte_alphabet() -> None:
    """Every byte once, and the same characters as the library's byte-level decoder."""
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    decoder = decoders.ByteLevel()
    for char, byte in alphabet.items():
        if byte < 128:
            assert decoder.decode([char]) == chr(byte)
    assert alphabet.keys() == set(pre_tokenizers.ByteLevel.alphabet())


def test_bos(write_llama: Callable[..., Path]) -> None:
    plain = open_checkpoint(write_llama()).tokenizer()
    hell = plain.encode("hell")
    assert plain.token_bytes(hell[0]) == b"hell" and len(hell) == 1
    assert plain.encode("hell", add_bos=True) == [1, *hell]
    adding = open_checkpoint(write_llama(metadata={"tokenizer.ggml.add_bos_token": (True, Values.BOOL)}))
    assert adding.config.add_bos
    tokenizer = adding.tokenizer()
    assert tokenizer.encode("hell") == [1, *hell]
    assert tokenizer.encode("hell", add_bos=False) == hell
    assert tokenizer.encode("<|im_start|>hell") == [1, *hell]


def test_bos_where_there_is_none() -> None:
    tokenizer = Tokenizer(
        Engine(models.BPE(vocab={"a": 0}, merges=[])),
        [b"a"],
        special=frozenset(),
        bos_id=None,
        eos_ids=(),
        add_bos=False,
    )
    assert tokenizer.encode("a") == [0]
    with pytest.raises(ValueError, match="names no BOS token"):
        tokenizer.encode("a", add_bos=True)
    with pytest.raises(ValueError, match=r"token id 1 is not in \[0, 1\)"):
        tokenizer.token_bytes(1)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "ab 1234's", ["ab", " 1234", "'s"]),
        ("smollm", "ab 1234's", ["ab", " ", "1", "2", "3", "4", "'s"]),
        ("llama-bpe", "ab 1234's\n\n x", ["ab", " ", "123", "4", "'s", "\n\n", " x"]),
        ("qwen2", "ab 1234's\n\n x", ["ab", " ", "1", "2", "3", "4", "'s", "\n\n", " x"]),
        ("falcon", "ab 12345's, x", ["ab", " ", "123", "45", "'", "s", ",", " x"]),
        ("default", "ab 12345's, x", ["ab", " ", "123", "45", "'", "s", ",", " x"]),
    ],
)
def test_pre_tokenizers(pre: str, text: str, pieces: list[str], write_llama: Callable[..., Path]) -> None:
    """Where each kind cuts, by the regular expressions of the models' own tokenizer files."""
    path = write_llama(metadata={"tokenizer.ggml.pre": (pre, Values.STRING)})
    tokenizer = open_checkpoint(path).tokenizer()
    engine = tokenizer._engine.pre_tokenizer
    assert engine is not None
    cut = [text.encode()[a:b].decode() for _, (a, b) in engine.pre_tokenize_str(text)]
    assert cut == pieces
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("arch", "kind"), [("opt", "gpt-2"), ("falcon", "falcon"), ("qwen2", "qwen2"), ("llama", "default")]
)
def test_pre_tokenizer_of_files_that_name_none(
    arch: str, kind: str, write_llama: Callable[..., Path]
) -> None:
    file = GgufFile(write_llama())
    assert pre_tokenizer_kind(file) == "smollm"
    del file.fields["tokenizer.ggml.pre"]
    file.fields["general.architecture"] = arch
    assert pre_tokenizer_kind(file) == kind


@pytest.mark.parametrize(
    ("key", "value", "kind", "message"),
    [
        ("tokenizer.ggml.model", "t5", Values.STRING, "'t5' is not supported.*safetensors"),
        ("tokenizer.ggml.pre", "tekken", Values.STRING, "'tekken' is not supported; expected one of gpt-2"),
        ("tokenizer.ggml.merges", ["h x"], Values.ARRAY, "does not join two tokens"),
        ("tokenizer.ggml.merges", ["he"], Values.ARRAY, "does not join two tokens"),
        ("tokenizer.ggml.tokens", ["a"] * 262, Values.ARRAY, "a token occurs twice"),
    ],
)
def test_refuses(
    key: str, value: object, kind: gguf.GGUFValueType, message: str, write_llama: Callable[..., Path]
) -> None:
    checkpoint = open_checkpoint(write_llama(metadata={key: (value, kind)}))
    with pytest.raises(FormatError, match=message):
        checkpoint.tokenizer()
