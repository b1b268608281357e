"""Documents and windows: the same everywhere, disjoint between splits, and refused when too short."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest

from training.sources import KINDS, Document, builtin_documents, chunks, sentences, user_documents
from training.texts import PER_DOCUMENT, SPLITS, cut_windows, split_of, summary


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return builtin_documents()


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.slow
def test_there_is_text_of_every_kind_for_every_split(documents: list[Document]) -> None:
    names = [d.name for d in documents]
    assert len(set(names)) == len(names)
    for kind in KINDS:
        for split in SPLITS:
            chars = sum(len(d.text) for d in documents if d.kind == kind and split_of(d.group) == split)
            assert chars > 100_000, (kind, split)


def test_kinds_are_what_they_say(documents: list[Document]) -> None:
    for document in documents:
        if document.kind == "json":
            assert isinstance(json.loads(document.text), list)
    whole: dict[str, str] = {}
    for document in documents:
        if document.kind == "code":
            whole[document.group] = whole.get(document.group, "") + document.text
    ast.parse(whole["lib/json/decoder.py"])
    prose = "".join(d.text for d in documents if d.kind == "prose")
    assert ">>>" not in prose[:200_000]
    assert sum(c.isalpha() or c.isspace() for c in prose) > 0.9 * len(prose)


def test_chunks_keep_the_text() -> None:
    text = "".join(f"line {i}\n" for i in range(500))
    pieces = list(chunks(text, 100))
    assert "".join(pieces) == text
    assert all(100 <= len(piece) < 120 and piece.endswith("\n") for piece in pieces[:-1])
    assert list(chunks("")) == []


def test_sentences_drop_examples_and_tables() -> None:
    prose = "This function returns the sum of\n   both of its arguments, or nothing."
    table = "+------+------+\n| name | size |\n+------+------+."
    assert sentences(f"{prose}\n\n{table}\n\n>>> f(1)\n2") == prose.replace("\n   ", "\n") + "\n"
    assert sentences(table) == ""


def test_splits_share_no_document(documents: list[Document]) -> None:
    names = {}
    for split in SPLITS:
        got = cut_windows(documents, encode, split, per_kind=20, tokens=200)
        again = cut_windows(documents[::-1], encode, split, per_kind=20, tokens=200)
        np.testing.assert_array_equal(got.ids, again.ids)
        assert got.ids.shape == (60, 200) and got.ids.dtype == np.int32
        assert got.kinds == tuple(kind for kind in KINDS for _ in range(20))
        assert len(got.used) >= 3 * 20 / PER_DOCUMENT
        names[split] = {entry["name"].rpartition("#")[0] for entry in got.used if entry["kind"] != "json"}
    assert not names["calibration"] & names["selection"]
    assert not names["calibration"] & names["test"]
    assert not names["selection"] & names["test"]


def test_windows_are_cut_from_the_text() -> None:
    documents = [Document("a", "code", "a", "abcdefghij"), Document("b", "code", "b", "xy")]
    documents += [Document("p", "prose", "a", "0123")]
    split = split_of("a")
    got = cut_windows(documents, encode, split, per_kind=9, tokens=4, bos_id=7)
    assert got.kinds == ("prose", "code", "code")
    rows = [[7, *map(ord, text)] for text in ("012", "abc", "def")]
    assert got.ids.tolist() == rows
    first = got.first(1)
    assert first.ids.tolist() == rows[:2] and first.kinds == ("prose", "code")
    assert summary(got)["code"] == {
        "documents": 1,
        "bytes": 10,
        "tokens": 8,
        "sha256": summary(got)["code"]["sha256"],
    }


def test_too_little_text_is_refused() -> None:
    document = Document("a", "code", "a", "abc")
    with pytest.raises(ValueError, match="no text for .* longer texts"):
        cut_windows([], encode, "test", per_kind=2, tokens=4)
    with pytest.raises(ValueError, match="as long as a window of 4 tokens"):
        cut_windows([document], encode, split_of("a"), per_kind=2, tokens=4)


def test_user_files(tmp_path: Path) -> None:
    for name, text in (("a.py", "x = 1\n" * 900), ("b.json", "{}\n"), ("c.txt", "Words.\n")):
        (tmp_path / name).write_text(text)
    got = user_documents([tmp_path / name for name in ("a.py", "b.json", "c.txt")])
    assert [d.kind for d in got] == ["code", "code", "json", "prose"]
    assert [d.name for d in got] == ["user/a.py#0", "user/a.py#1", "user/b.json#0", "user/c.txt#0"]
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, message in (("empty.txt", "is empty"), ("binary", "UTF-8"), ("missing", "No such file")):
        with pytest.raises(ValueError, match=message):
            user_documents([tmp_path / name])
