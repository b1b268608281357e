"""What a model is asked to write, and that its answers become files."""

from pathlib import Path

import pytest

from training.own_text import FORMS, TOPICS, main, prompts


def test_every_text_is_asked_for_once_and_topics_follow_each_other() -> None:
    every = list(prompts(len(FORMS) * len(TOPICS)))
    assert len({name for name, _ in every}) == len({text for _, text in every}) == len(every)
    some = list(prompts(30))
    assert every[:30] == some
    assert len({topic for topic in TOPICS for _, text in some if topic in text}) >= 12


@pytest.mark.parametrize("count", ["0", "301"])
def test_a_count_out_of_range_is_refused(count: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["smollm2-135m", "--out", str(tmp_path / "out"), "--texts", count]) == 2
    assert "choose 1 to 300" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_answers_become_files(default_model: Path, tmp_path: Path) -> None:
    words = [str(default_model), "--texts", "3", "--tokens", "12", "--temperature", "0"]
    for out in ("one", "two"):
        assert main([*words, "--out", str(tmp_path / out)]) == 0
    texts = {path.name: path.read_text() for path in sorted((tmp_path / "one").iterdir())}
    assert list(texts) == ["own-000.txt", "own-001.txt", "own-002.txt"]
    assert all(len(text.split()) > 3 for text in texts.values()) and len(set(texts.values())) == 3
    assert texts == {path.name: path.read_text() for path in (tmp_path / "two").iterdir()}
