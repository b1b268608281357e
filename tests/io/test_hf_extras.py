"""What published safetensors folders hold beside the weights that are read, and how they name those."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf_cases import raw_tensors
from numpy_reference import forward
from safetensors.numpy import save_file

from kairox_jax.io import FormatError, open_checkpoint

MODELS = Path(__file__).parents[1] / "data/models"
Tensors = dict[str, np.ndarray]


@pytest.fixture
def rewrite(tmp_path: Path) -> Callable[..., Path]:
    """Copy a case with its tensors changed and keys of its config replaced."""

    def make(name: str, change: Callable[[Tensors], Tensors], **keys: object) -> Path:
        folder = tmp_path / name
        shutil.copytree(MODELS / name, folder)
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        save_file(change(raw_tensors(MODELS / name)), folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text()) | keys
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def assert_logits(folder: Path) -> None:
    with np.load(folder / "expected.npz") as expected:
        ids, want = expected["input_ids"], expected["logits"]
    assert np.abs(forward(open_checkpoint(folder), ids) - want).max() <= 2e-4 * np.abs(want).max()


def extra(shape: int | tuple[int, ...] = 8) -> np.ndarray:
    return np.full(shape, 7.0, np.float32)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("relu-llama", ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
        ("relu-llama", ["model.rotary_emb.inv_freq"]),
        ("relu-falcon", ["transformer.h.1.self_attention.rotary_emb.inv_freq", "lm_head.weight"]),
        ("opt", ["lm_head.weight"]),
        ("sparse-qwen2", ["lm_head.weight"]),
        ("bamboo", ["model.layers.0.mlp.predictor.fc1.weight", "model.layers.0.mlp.predictor.fc2.weight"]),
    ],
)
def test_tensors_without_effect(name: str, names: list[str], rewrite: Callable[..., Path]) -> None:
    """Rotary tables, an output matrix beside tied embeddings, predictors within the FFN."""
    assert_logits(rewrite(name, lambda tensors: tensors | {key: extra() for key in names}))


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("relu-llama", "model."), ("opt", "model."), ("opt", "model.decoder."), ("relu-falcon", "transformer.")],
)
def test_names_without_prefix(name: str, prefix: str, rewrite: Callable[..., Path]) -> None:
    assert_logits(
        rewrite(name, lambda tensors: {key.removeprefix(prefix): values for key, values in tensors.items()})
    )


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.0.mlp.gate_proj.bias",
        "model.layers.0.pre_feedforward_layernorm.weight",
        "lm_head.bias",
        "score.weight",
    ],
)
def test_tensors_that_would_change_the_result(name: str, rewrite: Callable[..., Path]) -> None:
    with pytest.raises(FormatError, match=f"{name}: is not part of this architecture"):
        open_checkpoint(rewrite("relu-llama", lambda tensors: tensors | {name: extra()}))


def test_safetensors_beside_pickles(rewrite: Callable[..., Path]) -> None:
    folder = rewrite("relu-llama", lambda tensors: tensors)
    (folder / "pytorch_model.bin").write_bytes(b"PK\3\4")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    assert_logits(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickles_alone(name: str, rewrite: Callable[..., Path]) -> None:
    folder = rewrite("relu-llama", lambda tensors: tensors)
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(
        FormatError, match="missing; there are only PyTorch pickles .*convert them once"
    ) as error:
        open_checkpoint(folder)
    assert error.value.field == name and f"from_pretrained('{folder}'" in str(error.value)
