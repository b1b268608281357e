"""`kairox convert` as people call it."""

import json
import sys
from pathlib import Path

import pytest

from kairox_jax.cli import main

MODELS = Path(__file__).parent / "data/models"


def test_the_closing_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(MODELS / "relu-llama"), str(tmp_path / "out"), "--json"]) == 0
    captured = capsys.readouterr()
    facts = json.loads(captured.out)
    stored = json.loads((tmp_path / "out/kairox.json").read_text())
    sizes = [weight["shape"] for weight in stored["weights"].values()]
    assert facts["parameters"] == sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in sizes)
    assert facts["bytes"] == 4 * facts["parameters"] and facts["parity"] == 0
    assert facts["activation"] == "relu" and 0.2 < facts["active_frac"] < 0.8
    assert facts["sample"] == "random ids" and facts["sample_tokens"] == 32
    assert captured.err.count("MB written") >= 1 and "\r" not in captured.err


def test_the_closing_line_of_a_quantised_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.gguf"
    assert main(["convert", str(MODELS / "relu-llama"), str(target), "--quantize", "q8_0", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out.count("\n") == 1
    assert captured.out.startswith(f"{target}: 0.1 M parameters") and " relu, " in captured.out
    parity = float(captured.out.split("from the source ")[1].split()[0])
    assert 1e-5 < parity < 0.1
    assert main(["info", str(target), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["activation"] == "relu" and facts["tensors"]["q8_0"]["count"] > 7


def test_info_of_an_orbax_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "out")
    assert main(["convert", str(MODELS / "relu-llama"), target, "--quantize", "q8_0", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["info", target, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["family"] == "llama" and facts["path"] == target
    assert sum(of_type["bytes"] for of_type in facts["tensors"].values()) == facts["num_bytes"]
    assert set(facts["tensors"]) == {"f32", "q8_0"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convert", "{model}", "{model}"], "exists: give --force"),
        (["convert", "{model}", "{out}", "--quantize", "q5"], "--quantize: 'q5' is not one of keep, f32"),
        (["convert", "{model}", "{out}", "--to", "onnx"], "--to: 'onnx' is not one of orbax, gguf"),
        (
            ["convert", "{model}", "{out}.gguf", "--to", "orbax"],
            "--to orbax writes a folder, this names a GGUF file",
        ),
        (["convert", "{model}"], "DST"),
        (["convert", "nowhere.gguf", "{out}"], "nowhere.gguf: no such file or folder"),
        (["convert", "{file}/x", "{out}"], "no such file or folder"),
        (["convert", "{model}", "{file}/out"], "Not a directory"),
    ],
)
def test_mistakes_in_one_line(words, message, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "exists").mkdir()
    places = {"model": MODELS / "relu-llama", "out": tmp_path / "out", "file": tmp_path / "file"}
    filled = [word.format(**places) for word in words]
    if message.startswith("exists"):
        filled[-1] = str(tmp_path / "exists")
    assert main(filled) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("kairox: error: ")


def test_the_command_line_starts_without_orbax(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    code = "import sys, kairox_jax.cli; print(sorted({'orbax', 'jax', 'gguf'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
