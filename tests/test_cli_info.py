"""`kairox info` and `kairox pull` on the default model, whose facts are published."""

import json
from pathlib import Path

import pytest

from kairox_jax.cli import main
from kairox_jax.commands.info import collect, report

FACTS = {
    "family": "llama",
    "num_layers": 30,
    "d_model": 576,
    "num_neurons": 1536,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "context_length": 8192,
    "activation": "silu",
    "tie_embeddings": True,
    "licence": "Apache-2.0",
    "chat_template": True,
}


def test_the_default_model(default_model: Path, capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {name: facts[name] for name in FACTS} == FACTS
    # Seven matrices a layer in 4 bits (20 bytes for 32 weights), the embedding in 8 (34 for 32).
    assert facts["tensors"]["q4_1"] == {"count": 210, "bytes": 30 * 3_538_944 * 20 // 32}
    assert facts["tensors"]["q8_0"] == {"count": 1, "bytes": 49152 * 576 * 34 // 32}
    assert facts["tensors"]["f32"] == {"count": 61, "bytes": 61 * 576 * 4}
    assert facts["num_bytes"] == sum(of_type["bytes"] for of_type in facts["tensors"].values())
    assert facts["path"] == str(default_model)


def test_a_path_gives_the_same(default_model: Path, capsys):
    main(["info", "--json"])
    by_name = json.loads(capsys.readouterr().out)
    main(["info", str(default_model), "--json"])
    by_path = json.loads(capsys.readouterr().out)
    assert {**by_path, "licence": "Apache-2.0"} == by_name


def test_the_report_for_people(default_model: Path, capsys):
    assert main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "layers      30 of width 576" in lines
    assert "attention   9 heads of 64, 3 for keys and values" in lines
    assert "            q4_1    210 tensors       66.4 MB" in lines


@pytest.mark.parametrize(
    ("sparsity", "activation", "expected"),
    [
        (None, "silu", "no thresholds: use --mode dense"),
        (None, "relu", "needs no thresholds: relu is exactly zero"),
        (
            {"least_threshold": 0.01, "largest_threshold": 0.5, "active_frac": 0.4321},
            "silu",
            "thresholds shipped, 0.01 to 0.5; 43% of the neurons active in calibration",
        ),
        (
            {"least_threshold": 0.01, "largest_threshold": 0.5, "active_frac": None},
            "silu",
            "thresholds shipped, 0.01 to 0.5",
        ),
    ],
)
def test_sparsity_is_explained(sparsity, activation, expected):
    facts = {
        **FACTS,
        "name": None,
        "path": "m.gguf",
        "num_bytes": 1,
        "tensors": {},
        "activation_threshold": 0.0,
        "activation_source": "config.json",
        "predictors": False,
    }
    lines = list(report({**facts, "sparsity": sparsity, "activation": activation}))
    (line,) = [line for line in lines if line.startswith("sparsity")]
    assert line.removeprefix("sparsity    ").startswith(expected)
    if sparsity is not None:
        assert line.endswith(expected)


def test_what_decided_the_activation_is_told(default_model: Path):
    facts = collect(str(default_model))
    lines = list(report(facts))
    assert "ffn         1536 neurons a layer, silu (by architecture 'llama')" in lines
    assert "predictors  none in the file" in lines


def test_pull_prints_the_path(default_model: Path, capsys):
    assert main(["pull", "smollm2-135m"]) == 0
    assert capsys.readouterr().out == f"{default_model}\n"


@pytest.mark.parametrize("command", ["pull", "info"])
def test_unknown_names(command, capsys):
    assert main([command, "smollm2-135"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("kairox: error: unknown model 'smollm2-135': did you mean 'smollm2-135m'?")
    assert err.count("\n") == 1


def test_files_that_are_no_models(tmp_path, capsys):
    file = tmp_path / "notes.gguf"
    file.write_text("these are only notes, not a model\n")
    assert main(["info", str(file)]) == 2
    err = capsys.readouterr().err
    assert str(file) in err and err.count("\n") == 1


@pytest.mark.parametrize("command", [["info", ""], ["eval", ""], ["replay", ""], ["group", ""]])
def test_an_empty_argument_is_refused(command, capsys):
    assert main(command) == 2
    err = capsys.readouterr().err
    assert err.startswith("kairox: error: ") and err.endswith(" is empty: name what it stands for\n")
