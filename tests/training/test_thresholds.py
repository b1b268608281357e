"""The command from text to files, on a tiny random model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kairox_jax.io.sparsity import check_model, load_sparsity
from training import thresholds
from training.choose import choose_thresholds, rises
from training.forward import layered
from training.measure import evaluate
from training.texts import Windows


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    """Files of two kinds, long enough for all three splits."""
    rng = np.random.default_rng(0)
    words = ["neuron", "slot", "record", "layer", "token", "link", "step", "host", "device"]
    prose = ".\n".join(" ".join(rng.choice(words, 9)) for _ in range(700))
    table = json.dumps([{"id": int(i), "name": str(rng.choice(words))} for i in range(900)], indent=1)
    (tmp_path / "a.txt").write_text(prose)
    (tmp_path / "b.json").write_text(table)
    return [str(tmp_path / "a.txt"), str(tmp_path / "b.json")]


def command(monkeypatch: pytest.MonkeyPatch, source: Any, out: Path, text: list[str], *more: str) -> int:
    monkeypatch.setattr(thresholds, "open_checkpoint", lambda name: source)
    words = ["--model", "tiny", "--out", str(out), "--text-only", "--windows", "4", "--window", "16"]
    return thresholds.main([*words, "--batch", "2", *more, "--text", *text])


def test_writes_what_it_measured(
    monkeypatch: pytest.MonkeyPatch,
    source: Any,
    text: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert command(monkeypatch, source, out, text, "--max-loss", "0.1") == 0
    sparsity = load_sparsity(out)
    check_model(sparsity, source)
    assert sparsity.thresholds.max() > 0
    assert sparsity.frequency is not None
    frequency = sparsity.frequency.mean(axis=1)
    np.testing.assert_allclose(frequency, sparsity.meta["active_frac"], atol=1e-3)
    report = json.loads((out / "report.json").read_text())
    for tried in (report["chosen"]["tried"], report["equal_share"]["tried"]):
        assert any(candidate["worst_rise"] <= 0.1 for candidate in tried)
    for split in ("calibration", "selection", "test"):
        assert {entry["kind"] for entry in report["texts"][split]} == {"prose", "json"}
    for row in report["losses"].values():
        assert row["thresholded"] - row["dense"] == pytest.approx(row["rise"], abs=2e-4)
        assert 0 < row["active_frac"] < 1
    printed = capsys.readouterr()
    assert "equal share" in printed.out and "prose" in printed.out and "json" in printed.out
    assert "thresholds: 100%" in printed.err.splitlines()[-1]


def test_is_repeatable(monkeypatch: pytest.MonkeyPatch, source: Any, text: list[str], tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert command(monkeypatch, source, tmp_path / name, text) == 0
    a, b = (load_sparsity(tmp_path / name) for name in ("a", "b"))
    np.testing.assert_array_equal(a.thresholds, b.thresholds)
    assert a.meta == b.meta


def test_other_models_only_get_a_profile(
    monkeypatch: pytest.MonkeyPatch,
    source: Any,
    text: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = type(source)(activation="drelu")
    assert command(monkeypatch, source, tmp_path, text) == 0
    sparsity = load_sparsity(tmp_path)
    np.testing.assert_array_equal(sparsity.thresholds, np.zeros(3, np.float32))
    assert sparsity.frequency is not None and 0 < sparsity.frequency.mean() < 0.5
    assert "sparse by itself" in capsys.readouterr().out
    assert command(monkeypatch, source, tmp_path / "b", text, "--active-frac", "0.2") == 2
    assert "drelu takes no threshold" in capsys.readouterr().err


@pytest.mark.parametrize(("activation", "own"), [("relu", 0.0), ("fatrelu", 0.05)])
def test_relu_models_get_thresholds_on_the_gate(
    monkeypatch: pytest.MonkeyPatch, source: Any, text: list[str], tmp_path: Path, activation: str, own: float
) -> None:
    source = type(source)(activation=activation, activation_threshold=own)
    assert command(monkeypatch, source, tmp_path, text, "--active-frac", "0.2") == 0
    sparsity = load_sparsity(tmp_path)
    assert sparsity.meta["rule"] == "fatrelu" and sparsity.meta["activation"] == activation
    assert (sparsity.thresholds >= own).all() and sparsity.thresholds.max() > own
    assert sparsity.frequency is not None
    assert sparsity.frequency.mean() == pytest.approx(0.2, abs=0.01)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["max_loss"] is None and report["chosen"]["tried"]
    for row in report["losses"].values():
        assert row["active_frac"] == pytest.approx(0.2, abs=0.03)
        assert abs(row["dense"] - row["thresholded"]) > 1e-4


def test_limit_holds_on_the_text_it_was_chosen_on(decoder: Any) -> None:
    model = layered(decoder)
    rng = np.random.default_rng(2)
    both = [Windows(rng.integers(0, 128, (8, 12)).astype(np.int32), ("code",) * 8, ()) for _ in range(2)]
    left: list[int] = []
    work: list[int] = []
    chosen, equal = choose_thresholds(
        model, both[0], both[1], max_loss=0.1, batch=4, tick=work.append, settle=left.append
    )
    dense = evaluate(model, both[1], None, batch=4, tick=work.append)
    for choice in (chosen, equal):
        found = evaluate(model, both[1], choice.thresholds, batch=4, tick=work.append)
        rise, error = rises(dense, found, both[1])["code"]
        assert rise + error <= 0.1
        assert 0 < choice.shares.mean() < 1
    assert len(set(equal.shares)) == 1 < len(set(chosen.shares))
    assert len(left) == 2


def test_mistakes_take_one_line(
    monkeypatch: pytest.MonkeyPatch,
    source: Any,
    text: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")

    def fails(message: str, files: list[str], *more: str) -> None:
        assert command(monkeypatch, source, tmp_path / "out", files, *more) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert lines[-1].startswith("error: ") and message in lines[-1], lines
        assert not (tmp_path / "out").exists()

    fails("empty.txt is empty", [str(tmp_path / "empty.txt")])
    fails("longer texts", [str(tmp_path / "short.txt")])
    fails("--max-loss 0.0 must be above zero", text, "--max-loss", "0")
    fails("--active-frac 1.5 must lie between 0 and 1", text, "--active-frac", "1.5")
    fails("--active-frac 0.01 is out of reach", text, "--active-frac", "0.01")
    fails("--windows 1 must be at least 2", text, "--windows", "1")
    source.broken = True
    fails("NaN", text)
    with pytest.raises(ValueError, match="--text-only leaves no text"):
        thresholds.parse(["--model", "m", "--out", "o", "--text-only"])
