"""The command from text to predictors on a tiny random model: figures, killing, devices, mistakes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kairox_jax import cli
from kairox_jax.io import check_predictors, load_predictors
from training import evaluation, predictors
from training.predictor_data import READS, decode_square, encode_size

PROCESS = Path(__file__).with_name("predictor_process.py")
ROOT = PROCESS.parents[2]
SETTINGS = (
    "--text-only --windows 8 --held 4 --window 16 --batch 4 --steps 60 --fit-batch 32 --every 20 --bytes 0.4"
)
TOGETHER = "--distil-steps 24 --distil-batch 4 --distil-every 8 --patience 9 --products bfloat16"


@pytest.fixture
def text(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    words = ["neuron", "slot", "record", "layer", "token", "link", "step", "host", "device"]
    (tmp_path / "a.txt").write_text(".\n".join(" ".join(rng.choice(words, 9)) for _ in range(900)))
    return str(tmp_path / "a.txt")


@pytest.fixture
def kairox(monkeypatch: pytest.MonkeyPatch, source: Any) -> Any:
    for module in (predictors, evaluation):
        monkeypatch.setattr(module, "open_checkpoint", lambda name: source)
    return lambda words: cli.main(words.split())


def start(words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROCESS), *words.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def report_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "predictors_report.json").read_text())


def test_sizes_survive_their_code(rng: np.random.Generator) -> None:
    z = rng.normal(size=5000).astype(np.float32) * 10.0 ** rng.uniform(-4, 2, 5000).astype(np.float32)
    got = np.sqrt(np.asarray(decode_square(encode_size(jnp.asarray(z)))))
    np.testing.assert_allclose(got, np.abs(z), rtol=0.045, atol=1e-6)
    np.testing.assert_array_equal(decode_square(encode_size(jnp.zeros(3))), np.zeros(3))


@pytest.mark.slow
def test_kill_and_devices_change_nothing(
    kairox: Any, source: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"train-predictors tiny {text} {SETTINGS} {TOGETHER} --out {tmp_path}"
    killed = start(f"{command}/killed")
    # Killed before anything else runs: left alone it would end while this process is at work.
    work = tmp_path / "killed" / "predictors.work"
    deadline = time.monotonic() + 240
    while not [*work.glob("layer-001/step-*"), *work.glob("fit-001.npz")] and time.monotonic() < deadline:
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.05)
    killed.kill()
    killed.communicate()
    devices = start(f"{command}/two", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert kairox(f"{command}/whole") == 0
    whole = report_of(tmp_path / "whole")
    layers = whole["layers"]
    assert all(row["held_out_loss"] < row["first_loss"] for row in layers)
    trained = load_predictors(tmp_path / "whole")
    check_predictors(trained, source)
    assert all(layer.rest is not None for layer in trained.layers)
    assert whole["command"].endswith("--products bfloat16 --steps 60 --window 16 --windows 8 --text-only")
    assert whole["end_to_end"]["held_out_loss"] <= whole["end_to_end"]["first_loss"]
    assert whole["forecast_ms_per_layer"]["host"] > 0 and whole["forecast_ms_per_layer"]["jax"] > 0
    assert trained.input == "adjacent" and 0 < whole["modes"]["predicted"]["recall_by_contribution"] <= 1
    assert whole["modes"]["predicted"]["touched_frac"] == pytest.approx(0.54, abs=0.06)
    assert not (tmp_path / "whole" / "predictors.work").exists()

    assert (work / "fit-000.npz").exists() and not (tmp_path / "killed" / "predictors_report.json").exists()
    before = (work / "fit-000.npz").stat().st_mtime_ns
    assert kairox(f"train-predictors tiny {text} {SETTINGS} {TOGETHER} --seed 1 --out {tmp_path}/killed") == 2
    assert "holds a run with another seed" in capsys.readouterr().err
    kept: list[int] = []
    original = predictors.Trainer._fit

    def fit(self: Any, *args: Any) -> Any:
        kept.append((work / "fit-000.npz").stat().st_mtime_ns)
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictors.Trainer, "_fit", fit)
        assert kairox(f"{command}/killed") == 0
    assert kept == [before]  # the finished layer was not trained again
    again = report_of(tmp_path / "killed")["layers"]
    for row, other in zip(layers, again, strict=True):
        assert row["held_out_loss"] == pytest.approx(other["held_out_loss"], abs=1e-6)
        assert row["steps"] == other["steps"]
    x = np.random.default_rng(1).normal(size=(4, 16)).astype(np.float32)
    resumed = load_predictors(tmp_path / "killed")
    for layer in range(3):
        np.testing.assert_allclose(resumed.predict(layer, x), trained.predict(layer, x), atol=1e-6)
        np.testing.assert_allclose(
            resumed.estimate_rest(layer, x), trained.estimate_rest(layer, x), atol=1e-6
        )

    _, errors = devices.communicate(timeout=240)
    assert devices.returncode == 0, errors
    for row, other in zip(layers, report_of(tmp_path / "two")["layers"], strict=True):
        assert other["held_out_loss"] == pytest.approx(row["held_out_loss"], rel=2e-3)


@pytest.mark.parametrize("reads", READS)
def test_targets_and_eval(
    reads: str, kairox: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"train-predictors tiny {text} {SETTINGS} --steps 5 --distil-steps 0 --out {tmp_path}/r"
    assert kairox(f"{command} --recall 0.9 --input {reads}") == 0
    assert load_predictors(tmp_path / "r").input == reads
    figures = report_of(tmp_path / "r")["modes"]["predicted"]
    assert figures["recall_by_contribution"] == pytest.approx(0.9, abs=0.06)
    assert report_of(tmp_path / "r")["family"] == "recall"
    capsys.readouterr()
    line = (
        f"eval tiny {text} --modes dense,predicted --predictors {tmp_path}/r --window 16 --tokens 64 --json"
    )
    assert kairox(f"{line} --curve 0.3,0.6 --quiet") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["modes"]) == {"dense", "predicted"}
    assert found["modes"]["dense"]["touched_frac"] == 1
    keys = ("nats_per_token", "kl_to_dense", "top1_agreement", "recall_by_contribution", "bytes_per_token")
    assert all(np.isfinite(found["modes"]["predicted"][key]) for key in keys)
    asked = [(point["choice"], point["asked"]) for point in found["curve"]]
    assert asked == [(c, s) for s in ("0.3", "0.6") for c in ("predicted", "oracle", "random")]


@pytest.mark.slow
def test_goes_on_from_given_predictors(
    kairox: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = f"train-predictors tiny {text} {SETTINGS}"
    assert kairox(f"{train} --distil-steps 0 --out {tmp_path}/alone") == 0
    more = (
        "--distil-steps 8 --distil-every 4 --distil-batch 4 --input own"  # also where they begin as another's
    )
    assert kairox(f"{train} {more} --start {tmp_path}/alone --out {tmp_path}/first") == 0
    shares = "--distil-shares prose=0.6,json=0.5"
    same = more.removesuffix(" --input own")  # goes on as those that are given
    assert kairox(f"{train} {same} {shares} --start {tmp_path}/first --out {tmp_path}/second") == 0
    assert [load_predictors(tmp_path / name).input for name in ("alone", "first", "second")] == [
        "adjacent",
        "own",
        "own",
    ]
    alone, first, second = (report_of(tmp_path / name) for name in ("alone", "first", "second"))
    assert [row["held_out_loss"] for row in first["layers"]] == [
        row["held_out_loss"] for row in alone["layers"]
    ]
    assert first["end_to_end"]["held_out_loss"] <= first["end_to_end"]["first_loss"]
    assert second["end_to_end"]["first_loss"] == pytest.approx(first["end_to_end"]["held_out_loss"], rel=0.1)
    assert second["started_from"]["command"] == first["command"]
    assert second["started_from"]["started_from"]["command"] == alone["command"]
    assert str(tmp_path) not in second["command"] and shares in second["command"]
    capsys.readouterr()
    work = f"--work {tmp_path}/work --out {tmp_path}/fourth"
    (tmp_path / "work").mkdir()
    kept = predictors.Trainer.run
    with pytest.MonkeyPatch.context() as patch:  # a run that ends early leaves its folder
        patch.setattr(predictors.Trainer, "run", lambda self: (_ for _ in ()).throw(ValueError("cut short")))
        assert kairox(f"{train} {more} --start {tmp_path}/alone {work}") == 2
    assert predictors.Trainer.run is kept
    capsys.readouterr()
    assert kairox(f"{train} {more} --start {tmp_path}/first {work}") == 2
    assert "holds a run with another start" in capsys.readouterr().err
    assert kairox(f"{train} --distil-steps 0 --start {tmp_path}/alone --out {tmp_path}/third") == 2
    assert "--start goes on with training all layers together" in capsys.readouterr().err


def test_mistakes_take_one_line(
    kairox: Any, source: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")
    out = f"--out {tmp_path}/o"

    def fails(message: str, words: str) -> None:
        assert kairox(words) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert lines[-1].startswith("kairox: error: ") and message in lines[-1], lines

    train = f"train-predictors tiny {text} {SETTINGS} --distil-steps 0"
    fails("--distil-shares is for training all layers", f"{train} {out} --distil-shares prose=0.6")
    train = f"train-predictors tiny {text} {SETTINGS} --distil-steps 1"
    fails("'prose=' is no KIND=X, such as", f"{train} {out} --distil-shares prose=")
    fails("prose has two shares", f"{train} {out} --distil-shares prose=0.6,prose=0.7")
    fails("empty.txt is empty", f"train-predictors tiny {tmp_path}/empty.txt --text-only {out}")
    fails("as long as a window", f"{train} --window 5000 {out}")
    fails("needs --out", train)
    fails("short.txt is a file: give a folder", f"{train} --out {tmp_path}/short.txt")
    fails("exclude each other", f"{train} {out} --share 0.5 --recall 0.5")
    fails("--share 1.5 must be between 0 and 1", f"{train} {out} --share 1.5")
    fails("--distil-shares verse=0.5 is no kind of", f"{train} {out} --distil-shares prose=0.6,verse=0.5")
    fails("--distil-shares code=1.5 is no kind", f"{train} {out} --distil-shares code=1.5")
    fails("'much' is not a number", f"{train} {out} --distil-shares code=much")
    fails("--distil-rate -1.0 must be above zero", f"{train} {out} --distil-rate -1")
    fails("--products int8 is not one of", f"{train} {out} --products int8")
    fails("--input layer_input is not one of adjacent, own", f"{train} {out} --input layer_input")
    fails("--text-only leaves no text", f"train-predictors tiny --text-only {out}")
    fails("training tokens are fewer than a batch", f"{train} {out} --fit-batch 500")
    fails("is NaN at step", f"{train} --out {tmp_path}/nan --rate 1e30")
    fails("there is no text", "eval tiny")
    fails("empty.txt is empty", f"eval tiny {tmp_path}/empty.txt")
    fails("short.txt has 5 tokens, a window 16", f"eval tiny {tmp_path}/short.txt --window 16")
    fails("no predictors are known", f"eval tiny {text} --window 16")
    fails("there is no", f"eval tiny {text} --window 16 --predictors {tmp_path}")
    fails("'fast' is not one of", f"eval tiny {text} --modes fast")
    source.broken = True
    fails("NaN", f"{train} --out {tmp_path}/broken")
