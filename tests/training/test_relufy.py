"""Distillation: losses against NumPy, the same end after a kill, and a saved model that runs by itself."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from kairox_jax import cli, load_model
from kairox_jax.io import open_checkpoint
from kairox_jax.models import load_decoder
from training import relufy_student
from training.forward import LayeredModel, layered
from training.measure import evaluate
from training.relufy import Plan, train
from training.relufy_student import as_layered, first_params, layer_loss, logit_loss, make_student
from training.texts import Windows

pytest.importorskip("optax", reason="optax is not installed")
pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")
SILU = Path(__file__).parents[1] / "data" / "models" / "llama3-rope"
PLAN = Plan(steps=(3, 2), rank=0, learning_rate=3e-3, batch=2, seed=1, model="m", texts="t")


@pytest.fixture
def teacher(source: Any) -> LayeredModel:
    return layered(load_decoder(source))


@pytest.fixture
def windows(rng: np.random.Generator) -> Windows:
    return Windows(rng.integers(0, 128, (6, 12)).astype(np.int32), ("prose",) * 6, ())


def test_losses_are_those_of_numpy(source: Any, teacher: LayeredModel, windows: Windows) -> None:
    student = make_student(teacher)
    ids = jnp.asarray(windows.ids)
    params = first_params(student, 0, 0)
    decoder, errors, active = load_decoder(source), [], []
    x = decoder.embed[...][ids]
    for block in decoder.blocks:
        x = x + block.attention(x, jnp.zeros(6, jnp.int32))[0]
        h = np.asarray(block.ffn.normalise(x), np.float64)
        gate, up = (h @ np.asarray(w[...], np.float64).T for w in (block.ffn.w_gate, block.ffn.w_up))
        down = np.asarray(block.ffn.w_down[...], np.float64)
        want, got = (gate / (1 + np.exp(-gate)) * up) @ down, (np.maximum(gate, 0) * up) @ down
        errors.append((np.square(got - want).sum(-1) / np.square(want).sum(-1)).mean())
        active.append((gate > 0).mean())
        x = x + jnp.asarray(want, jnp.float32)
    value, figures = layer_loss(student, params, ids)
    assert float(value) == pytest.approx(np.mean(errors), rel=1e-3)
    assert float(figures["error"]) == pytest.approx(np.sqrt(errors).mean(), rel=1e-3)
    assert float(figures["active"]) == pytest.approx(np.mean(active), abs=1e-3)

    def log_p(logits: Any) -> np.ndarray:
        logits = np.asarray(logits, np.float64)
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    relu = load_decoder(type(source)(activation="relu"))
    p, q = log_p(decoder(ids)), log_p(relu(ids))
    value, figures = logit_loss(student, params, ids)
    assert float(value) == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-3)
    losses = evaluate(
        as_layered(teacher, student, params), windows, None, batch=6, tick=lambda work: None
    ).losses
    want = -np.take_along_axis(q[:, :-1], windows.ids[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(losses, want, rtol=1e-3, atol=1e-3)


def test_adapters_begin_as_the_model_itself(teacher: LayeredModel) -> None:
    student = make_student(teacher)
    params = first_params(student, 4, 0)
    for name, matrix in relufy_student.merged(student, params).items():
        np.testing.assert_array_equal(matrix, student.layers["ffn"][name][...])
    a, b = params["w_up"]
    assert a.shape == (3, 40, 4) and b.shape == (3, 4, 16)
    params["w_up"] = (a + 1, b)
    got = relufy_student.merged(student, params)["w_up"]
    want = np.asarray(student.layers["ffn"]["w_up"][...], np.float64) + np.ones((40, 4)) @ np.asarray(
        b, np.float64
    )
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_killed_run_ends_where_it_would_have(
    teacher: LayeredModel, windows: Windows, tmp_path: Path
) -> None:
    student = make_student(teacher)
    whole = [done.curve for done in train(student, windows, PLAN, tmp_path / "a", save_every=2)][-1]
    for done in train(student, windows, PLAN, tmp_path / "b", save_every=2):
        if done.step == 3:  # one step after the last checkpoint
            break
    steps = [done.step for done in train(student, windows, PLAN, tmp_path / "b", save_every=2)]
    assert steps == [3, 4, 5]
    text = (tmp_path / "b" / "step-5" / "progress.json").read_text()
    assert len(list((tmp_path / "b").iterdir())) == 1
    again = json.loads(text)["curve"]
    assert [row["stage"] for row in again] == ["layers"] * 3 + ["logits"] * 2
    np.testing.assert_allclose(
        [row["error"] for row in again], [row["error"] for row in whole], rtol=0, atol=1e-6
    )
    assert whole[2]["error"] < whole[0]["error"]
    other = Plan(**{**vars(PLAN), "seed": 2})
    with pytest.raises(ValueError, match=r"another run \(different: seed\): give another --out"):
        next(train(student, windows, other, tmp_path / "b", save_every=2))


def test_every_window_is_used_once_before_any_is_used_again() -> None:
    rows = np.concatenate([PLAN.rows(step, 5) for step in range(5)])
    assert sorted(rows[:5]) == sorted(rows[5:]) == list(range(5))
    assert rows[:5].tolist() != rows[5:].tolist()


def test_nan_ends_the_run(source: Any, windows: Windows, tmp_path: Path) -> None:
    source.broken = True
    student = make_student(layered(load_decoder(source)))
    with pytest.raises(ValueError, match=r"step 0 \(layers\) is NaN or infinite: lower --learning-rate"):
        next(train(student, windows, PLAN, tmp_path, save_every=2))
    assert not list(tmp_path.glob("step-*"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny SiLU checkpoint with a tokenizer of single bytes, and text for it."""
    path = tmp_path / "silu"
    shutil.copytree(SILU, path)
    letters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]  # byte-level blank and line end
    engine = Tokenizer(models.BPE(vocab={letter: i + 3 for i, letter in enumerate(letters)}, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.save(str(path / "tokenizer.json"))
    words = np.random.default_rng(0).choice(["neuron", "slot", "record", "layer", "token"], 30000)
    (tmp_path / "t.txt").write_text("\n".join(" ".join(words[i : i + 9]) for i in range(0, 30000, 9)))
    return path


@pytest.mark.slow
def test_the_saved_model_is_a_relu_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sparsify", str(folder), "--relu", "-o", str(tmp_path / "out"), "--text-only", "--windows", "3"]
    words += ["--text", str(tmp_path / "t.txt"), "--window", "16", "--batch", "2", "--rank", "2"]
    assert cli.main([*words, "--steps", "2", "--logit-steps", "1"]) == 0, capsys.readouterr().err
    assert "untrained" in capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    row = report["losses"]["prose"]
    assert row["relu"] - row["dense"] == pytest.approx(row["rise"], abs=2e-4) and 0 < row["active_frac"] < 1
    assert len(report["curve"]) == 3

    path = tmp_path / "out" / "model"
    config = json.loads((path / "config.json").read_text())
    assert config["hidden_act"] == "relu" and config["rope_parameters"]["rope_type"] == "llama3"
    model = load_model(path)
    assert model.config.activation == "relu"
    teacher = load_model(folder)
    for name in ("wqkv", "wo"):  # what is not trained is the teacher's, to float16
        ours, theirs = (getattr(m.blocks[1].attention, name)[...] for m in (model, teacher))
        np.testing.assert_allclose(ours, theirs, atol=1e-3)
    assert float(jnp.abs(model.blocks[1].ffn.w_up[...] - teacher.blocks[1].ffn.w_up[...]).max()) > 1e-4
    source = open_checkpoint(path)
    assert source.tokenizer().encode("slot") == open_checkpoint(folder).tokenizer().encode("slot")
    ids = np.array([[5, 9, 20, 7]], np.int32)
    exact = load_model(path, "exact")  # the same function: a ReLU model needs no thresholds
    np.testing.assert_array_equal(exact(jnp.asarray(ids)), model(jnp.asarray(ids)))


def test_mistakes_take_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(message: str, *words: str, model: Path = folder) -> None:
        assert cli.main(["sparsify", str(model), "-o", str(tmp_path / "out"), *words]) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert lines[-1].startswith("kairox: error: ") and message in lines[-1], lines

    relu_model = SILU.parent / "relu-llama"
    fails(
        "--relu distils gated SiLU models; this one is llama with activation relu", "--relu", model=relu_model
    )
    fails("take one step or more", "--relu", "--steps", "0", "--logit-steps", "0")
    fails("--learning-rate 0.0 must be above zero", "--relu", "--learning-rate", "0")
    fails("--rank -1 must be 0", "--relu", "--rank=-1")
    fails("--text-only leaves no text", "--relu", "--text-only")
    fails("--max-loss has no effect with --relu", "--relu", "--max-loss", "0.1")
    fails("--rank has no effect without --relu", "--rank", "4")
    fails("--active-frac 2.0 must lie between 0 and 1", "--active-frac", "2")
    assert cli.main(["sparsify", "m"]) == 2
    assert "needs --out FOLDER" in capsys.readouterr().err
