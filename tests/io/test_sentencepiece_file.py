"""``tokenizer.model``: ids against the sentencepiece library's, added tokens, and damaged files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kairox_jax.io import FormatError, Tokenizer
from kairox_jax.io.hf_tokenizer import adds_bos, hf_tokenizer
from kairox_jax.io.sentencepiece_file import read_sentencepiece

DATA = Path(__file__).parents[1] / "data"
CASE = json.loads((DATA / "sentencepiece.json").read_text(encoding="utf-8"))
COUNT = len(CASE["tokens"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(DATA / "sentencepiece.model", tmp_path / "tokenizer.model")
    return tmp_path


def load(folder: Path) -> Tokenizer:
    return hf_tokenizer(folder, bos_id=1, eos_ids=(2,), add_bos=adds_bos(folder))


def write(folder: Path, name: str, values: Any) -> None:
    (folder / name).write_text(json.dumps(values))


def test_the_vocabulary(folder: Path) -> None:
    vocab = read_sentencepiece(folder / "tokenizer.model")
    assert vocab.tokens == CASE["tokens"] and vocab.types.tolist() == CASE["types"]
    assert vocab.scores.tolist() == CASE["scores"] and (vocab.unknown, vocab.add_space) == ("<unk>", True)


def test_ids_of_the_library(folder: Path) -> None:
    tokenizer = load(folder)
    wrong = [case for case in CASE["cases"] if tokenizer.encode(case["text"], add_bos=False) != case["ids"]]
    # The library reads "<s>" in a text as text; here, as everywhere else, it is the control token.
    assert [case["text"] for case in wrong] == ["<s> is no control token in a text"]
    for case in CASE["cases"]:
        assert tokenizer.decode(case["ids"]) == case["text"].replace("\u2581", " ")


def test_who_adds_bos(folder: Path) -> None:
    """LlamaTokenizer does unless told otherwise."""
    assert load(folder).encode("a")[0] == 1
    write(folder, "tokenizer_config.json", {"add_bos_token": False})
    assert load(folder).encode("a")[0] != 1


def test_added_tokens(folder: Path) -> None:
    """Of the old file and of the new key; special ones stand for no text, ends of a turn end a text."""
    write(folder, "added_tokens.json", {"<|im_start|>": COUNT, "<tool>": COUNT + 2, "<s>": 1})
    decoder = {
        "1": {"content": "<s>", "special": True},
        str(COUNT): {"content": "<|im_start|>", "special": True},
        str(COUNT + 1): {"content": "<|im_end|>", "special": True},
    }
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": decoder})
    tokenizer = load(folder)
    assert tokenizer.vocab_size == COUNT + 3 and tokenizer.eos_ids == (2, COUNT + 1)
    ids = tokenizer.encode("<|im_start|>a<tool><|im_end|>", add_bos=False)
    assert (ids[0], ids[-2], ids[-1]) == (COUNT, COUNT + 2, COUNT + 1)
    assert tokenizer.token_bytes(COUNT) == b"" and tokenizer.token_bytes(COUNT + 2) == b"<tool>"


def test_tokenizer_json_is_preferred(folder: Path) -> None:
    write(folder, "tokenizer.json", {"model": {}})
    with pytest.raises(FormatError, match="tokenizer.json: cannot be read"):
        load(folder)


def changed(folder: Path, old: bytes, new: bytes) -> Path:
    path = folder / "tokenizer.model"
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # In trainer_spec, model_type follows model_prefix; in normalizer_spec, the flag follows the name.
        (
            b"\x18\x02\x20\xbc\x05",
            b"\x18\x01\x20\xbc\x05",
            "trainer_spec.model_type: only BPE .*save_pretrained",
        ),
        (
            b"identity\x12\x00\x20\x00",
            b"identity\x12\x00\x20\x01",
            "remove_extra_whitespaces: true",
        ),
        (b"\x0a\x05<unk>", b"\x0a\x05\xff\xfe\xfd>>", r"pieces\[0\]: expected a text, a score and a type"),
    ],
)
def test_refuses(old: bytes, new: bytes, message: str, folder: Path) -> None:
    with pytest.raises(FormatError, match=message):
        read_sentencepiece(changed(folder, old, new))


def test_ids_that_leave_a_gap_are_refused(folder: Path) -> None:
    write(folder, "added_tokens.json", {"<tool>": COUNT + 1})
    with pytest.raises(FormatError, match="added tokens: their ids do not follow the 700"):
        load(folder)
    write(folder, "added_tokens.json", {"<tool>": 2**40})
    with pytest.raises(FormatError, match="added tokens"):
        load(folder)


def test_damaged_files(folder: Path) -> None:
    """Cut anywhere, or with bytes that are no lengths."""
    path = folder / "tokenizer.model"
    good, refused = path.read_bytes(), 0
    cuts = [good[:at] for at in range(0, len(good), 97)]
    changes = [good[:at] + b"\xff" * 10 + good[at + 10 :] for at in range(0, len(good) - 10, 97)]
    for data in cuts + changes:
        path.write_bytes(data)
        try:
            read_sentencepiece(path)
        except FormatError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            refused += 1
    assert refused > 0.9 * len(cuts + changes)
