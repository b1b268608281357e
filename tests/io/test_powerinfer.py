"""PowerInfer's files: their magic, matrices by neuron, predictors and threshold."""

from pathlib import Path
from typing import Any

import gguf
import gguf_cases as cases
import numpy as np
import pytest
from flax import nnx
from numpy_reference import forward

from kairox_jax import load_model
from kairox_jax.io import FormatError, open_checkpoint
from kairox_jax.models import Decoder

Types = gguf.GGMLQuantizationType
THRESHOLD = "powerinfer.sparse_threshold"


def write(
    tmp_path: Path,
    name: str,
    arch: str,
    fields: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    types: dict[str, Types] | None = None,
) -> tuple[Path, dict[str, np.ndarray]]:
    """Write a case as PowerInfer's converter does; return the file and its tensors."""
    keys, tensors = cases.case(name, arch)
    tensors = cases.by_neuron(tensors) | (
        cases.predictors(tensors, keys[f"{arch}.block_count"]) if extra is None else extra
    )
    path = tmp_path / "model.powerinfer.gguf"
    cases.write_gguf(path, arch, keys | (fields or {}), tensors, magic=b"PWRI", types=types)
    return path, tensors


def expected(name: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(cases.MODELS / name / "expected.npz") as file:
        return file["input_ids"], file["logits"]


@pytest.mark.parametrize(
    ("name", "arch"), [("relu-llama", "llama"), ("bamboo", "bamboo"), ("relu-falcon", "falcon")]
)
def test_logits(name: str, arch: str, tmp_path: Path) -> None:
    """Its engine computes ReLU for every architecture but bamboo: no key is needed."""
    path, _ = write(tmp_path, name, arch)
    ids, want = expected(name)
    got = forward(open_checkpoint(path), ids)
    assert np.abs(got - want).max() <= 2e-4 * np.abs(want).max()


def test_through_load_model(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "relu-llama", "llama")
    ids, want = expected("relu-llama")
    got = np.asarray(nnx.jit(Decoder.__call__)(load_model(path), ids))
    assert np.abs(got - want).max() <= 2e-4 * np.abs(want).max()


@pytest.mark.parametrize("name", ["opt", "opt-untied"])
def test_opt_keeps_two_unused_positions(name: str, tmp_path: Path) -> None:
    """It counts them as context, names no epsilon, and has the down bias under the turned matrix's name."""
    keys, tensors = cases.case(name, "opt")
    positions = len(tensors["position_embd.weight"])
    keys |= {"opt.context_length": positions}
    path = tmp_path / "opt.gguf"
    turned = cases.by_neuron(tensors)
    assert "blk.0.ffn_down_t.bias" in turned
    cases.write_gguf(path, "opt", keys, turned, magic=b"PWRI")
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.context_length == positions - 2
    ids, want = expected(name)
    assert np.abs(forward(checkpoint, ids) - want).max() <= 2e-4 * np.abs(want).max()


def test_opt_without_the_unused_positions(tmp_path: Path) -> None:
    """As kairox.cpp's converter writes it."""
    keys, tensors = cases.case("opt", "opt")
    tensors["position_embd.weight"] = tensors["position_embd.weight"][2:]
    path = cases.write_gguf(tmp_path / "opt.gguf", "opt", keys, tensors)
    ids, want = expected("opt")
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.context_length == len(tensors["position_embd.weight"])
    assert np.abs(forward(checkpoint, ids) - want).max() <= 2e-4 * np.abs(want).max()
    tensors["position_embd.weight"] = tensors["position_embd.weight"][1:]
    broken = cases.write_gguf(tmp_path / "broken.gguf", "opt", keys, tensors)
    with pytest.raises(FormatError, match="opt.context_length: 256 does not fit the 255 rows"):
        open_checkpoint(broken)


def test_predictors(tmp_path: Path) -> None:
    """Ranks differ from layer to layer; the threshold is of the raw score."""
    path, tensors = write(tmp_path, "relu-llama", "llama", {THRESHOLD: 0.75})
    checkpoint = open_checkpoint(path)
    assert checkpoint.sparse_threshold == 0.75
    for layer in range(2):
        for ours, theirs in (("pred_fc1", "fc1"), ("pred_fc2", "fc2")):
            want = tensors[f"blk.{layer}.{theirs}.weight"]
            np.testing.assert_array_equal(checkpoint.tensor(f"layers.{layer}.{ours}"), want)
    assert checkpoint.tensor("layers.1.pred_fc1").shape == (9, 64)
    assert open_checkpoint(write(tmp_path, "relu-llama", "llama")[0]).sparse_threshold == 0.0
    plain = open_checkpoint(write(tmp_path, "relu-llama", "llama", extra={})[0])
    assert plain.sparse_threshold is None and not plain.has("layers.0.pred_fc1")
    assert open_checkpoint(cases.MODELS / "relu-llama").sparse_threshold is None


@pytest.mark.parametrize("kind", [Types.F16, Types.Q8_0, Types.Q4_0])
def test_rows_of_the_down_matrix_are_packed(kind: Types, tmp_path: Path) -> None:
    """By neuron, as the file holds them: nothing is transposed."""
    name = "blk.1.ffn_down_t.weight"
    path, tensors = write(tmp_path, "relu-llama", "llama", types={name: kind})
    packed = open_checkpoint(path).packed("layers.1.w_down")
    assert packed is not None and packed.shape == (160, 64) and packed.format == kind.name.lower()
    assert not packed.data.flags.owndata
    want = gguf.quants.dequantize(gguf.quants.quantize(tensors[name], kind), kind)
    np.testing.assert_array_equal(packed.dequantize(), want)


def test_matrices_by_neuron_of_kairox_cpp(tmp_path: Path) -> None:
    """Turned under the usual name, beside predictors that read another input and are left alone."""
    keys, tensors = cases.case("prosparse-llama", "prosparse-llama")
    rng = np.random.default_rng(4)
    for layer in range(2):
        down = f"blk.{layer}.ffn_down.weight"
        tensors[down] = np.ascontiguousarray(tensors[down].T)
        for part, shape in (("up", (8, 64)), ("down", (160, 8))):
            tensors[f"blk.{layer}.ffn_pred_{part}.weight"] = rng.normal(size=shape).astype(np.float32)
    fields = keys | {"prosparse-llama.pred_lora": [8, 8]}
    path = cases.write_gguf(tmp_path / "kairox.gguf", "prosparse-llama", fields, tensors)
    checkpoint = open_checkpoint(path)
    ids, want = expected("prosparse-llama")
    assert np.abs(forward(checkpoint, ids) - want).max() <= 2e-4 * np.abs(want).max()
    assert checkpoint.sparse_threshold is None and checkpoint.packed("layers.0.w_down") is not None


def test_refuses_predictors_that_do_not_fit(tmp_path: Path) -> None:
    _, tensors = cases.case("relu-llama", "llama")
    made = cases.predictors(tensors, 2)
    some = {name: values for name, values in made.items() if name.startswith("blk.0.")}
    with pytest.raises(FormatError, match="blk.1.fc1.weight: missing or no matrix, while other layers"):
        open_checkpoint(write(tmp_path, "relu-llama", "llama", extra=some)[0])
    wrong = made | {"blk.1.fc2.weight": np.ones((160, 3), np.float32)}
    with pytest.raises(
        FormatError, match=r"blk.1.fc2.weight: shape \(160, 3\); the config asks for \(160, 9\)"
    ):
        open_checkpoint(write(tmp_path, "relu-llama", "llama", extra=wrong)[0])
    with pytest.raises(FormatError, match="sparse_threshold: nan is not finite"):
        open_checkpoint(write(tmp_path, "relu-llama", "llama", {THRESHOLD: float("nan")})[0])
