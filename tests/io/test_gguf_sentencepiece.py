"""SentencePiece vocabularies in GGUF files: ids against the sentencepiece library's, bytes against the text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kairox_jax.io import FormatError, Tokenizer, open_checkpoint

CASE = json.loads((Path(__file__).parents[1] / "data/sentencepiece.json").read_text(encoding="utf-8"))
Values = gguf.GGUFValueType


@pytest.fixture
def write_spm(write_llama: Callable[..., Path]) -> Callable[..., Path]:
    """Write a tiny llama file with the case's vocabulary; takes metadata that replaces or adds."""

    def make(metadata: dict[str, tuple[Any, Values]] | None = None, **columns: list) -> Path:
        column = {name: columns.get(name, CASE[name]) for name in ("tokens", "scores", "types")}
        own = {
            "tokenizer.ggml.model": ("llama", Values.STRING),
            "tokenizer.ggml.tokens": (column["tokens"], Values.ARRAY),
            "tokenizer.ggml.scores": (column["scores"], Values.ARRAY),
            "tokenizer.ggml.token_type": (column["types"], Values.ARRAY),
        }
        return write_llama(vocab=len(column["tokens"]), metadata=own | (metadata or {}))

    return make


@pytest.fixture
def tokenizer(write_spm: Callable[..., Path]) -> Tokenizer:
    return open_checkpoint(write_spm()).tokenizer()


def test_ids_of_the_library(tokenizer: Tokenizer) -> None:
    assert len(CASE["cases"]) > 100
    wrong = [case for case in CASE["cases"] if tokenizer.encode(case["text"], add_bos=False) != case["ids"]]
    # The library reads "<s>" in a text as text; here, as everywhere else, it is the control token.
    assert [case["text"] for case in wrong] == ["<s> is no control token in a text"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60).filter(lambda text: "\u2581" not in text))
def test_round_trip(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text, add_bos=False)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == (b" " if text else b"") + text.encode()


def test_special_tokens(tokenizer: Tokenizer, write_spm: Callable[..., Path]) -> None:
    """BOS comes first; control tokens in a text are parsed, and a space begins the text after them."""
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, (2,), True)
    plain = tokenizer.encode("The value", add_bos=False)
    assert tokenizer.encode("The value") == [1, *plain]
    assert tokenizer.encode("<s>The value</s>The value") == [1, *plain, 2, *plain]
    assert tokenizer.token_bytes(1) == b"" and tokenizer.is_special(0)
    off = {"tokenizer.ggml.add_bos_token": (False, Values.BOOL)}
    assert open_checkpoint(write_spm(off)).tokenizer().encode("The value") == plain


def test_ids_that_the_file_does_not_name(write_llama: Callable[..., Path]) -> None:
    """BOS is 1 and EOS 2 in these vocabularies."""
    from kairox_jax.io.gguf_file import GgufFile
    from kairox_jax.io.gguf_tokenizer import bos_token_id, end_token_ids

    file = GgufFile(write_llama(metadata={"tokenizer.ggml.model": ("llama", Values.STRING)}))
    for name in ("bos", "eos"):
        del file.fields[f"tokenizer.ggml.{name}_token_id"]
    assert (bos_token_id(file), end_token_ids(file)[0]) == (1, 2)
    file.fields["tokenizer.ggml.model"] = "gpt2"
    assert bos_token_id(file) is None


def test_without_a_space_before_the_text(tokenizer: Tokenizer, write_spm: Callable[..., Path]) -> None:
    plain = open_checkpoint(write_spm({"tokenizer.ggml.add_space_prefix": (False, Values.BOOL)})).tokenizer()
    assert plain.encode(" The value") == tokenizer.encode("The value")
    assert plain.encode("The value") != tokenizer.encode("The value")
    assert plain.decode(plain.encode(" x")) == " x" and tokenizer.decode(tokenizer.encode(" x")) == " x"


def test_tokens_of_the_user(write_spm: Callable[..., Path]) -> None:
    """They are whole wherever they stand, whatever their score."""
    tokens = [*CASE["tokens"], "<|tool|>", "[PAD]"]
    scores, types = [*CASE["scores"], -1000.0, -1000.0], [*CASE["types"], 4, 4]
    tokenizer = open_checkpoint(write_spm(tokens=tokens, scores=scores, types=types)).tokenizer()
    ids = tokenizer.encode("a<|tool|>b", add_bos=False)
    assert ids.count(len(CASE["tokens"])) == 1
    assert (
        tokenizer.token_bytes(len(CASE["tokens"])) == b"<|tool|>" and tokenizer.decode(ids) == "a<|tool|> b"
    )


@pytest.mark.parametrize(
    ("key", "value", "kind", "message"),
    [
        ("tokenizer.ggml.scores", [0.0], Values.ARRAY, "scores: missing or broken; expected 700 numbers"),
        ("tokenizer.ggml.scores", [float("nan")] * 700, Values.ARRAY, "scores: holds a NaN"),
        ("tokenizer.ggml.remove_extra_whitespaces", True, Values.BOOL, "true is not supported"),
        ("tokenizer.ggml.unknown_token_id", 700, Values.UINT32, "700 is no id of the 700 tokens"),
        ("tokenizer.ggml.add_space_prefix", "yes", Values.STRING, "'yes' where a value of type bool"),
        ("tokenizer.ggml.token_type", [6] * 700, Values.ARRAY, "'<unk>' is no byte such as <0x0A>"),
        ("tokenizer.ggml.token_type", [1] * 700, Values.ARRAY, "neither all bytes .* nor an unknown token"),
    ],
)
def test_refuses(key: str, value: object, kind: Values, message: str, write_spm: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(write_spm({key: (value, kind)}))
    with pytest.raises(FormatError, match=message) as error:
        checkpoint.tokenizer()
    assert str(checkpoint.path) in str(error.value)
