"""ReLU models with thresholds on the gate run as FATReLU; a sparsity of another activation is refused."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kairox_jax import load_model
from kairox_jax.io import Sparsity, fingerprint, open_checkpoint, save_sparsity
from kairox_jax.io.sparsity import shipped_sparsity

MODELS = Path(__file__).parents[1] / "data" / "models"
IDS = jnp.array([[3, 17, 5, 90, 41]])


def write(folder: Path, model: Path, thresholds: np.ndarray, **meta: object) -> Path:
    source = open_checkpoint(model)
    facts = {"fingerprint": fingerprint(source), "num_neurons": source.config.num_neurons, "model": "m"}
    save_sparsity(folder, Sparsity(thresholds, None, facts | {"activation": source.config.activation} | meta))
    return folder


def test_relu_becomes_fatrelu(tmp_path: Path) -> None:
    relu = MODELS / "relu-llama"
    layers = open_checkpoint(relu).config.num_layers
    cut = write(tmp_path / "s", relu, np.full(layers, 0.02, np.float32), rule="fatrelu")
    got = load_model(relu, "exact", sparsity=cut)
    assert got.config.activation == "fatrelu"
    shutil.copytree(relu, tmp_path / "fat")  # the same weights, as a checkpoint that says FATReLU itself
    config = json.loads((relu / "config.json").read_text())
    config |= {"hidden_act": "fatrelu", "hidden_act_param": 0.02}
    (tmp_path / "fat" / "config.json").write_text(json.dumps(config))
    want = load_model(tmp_path / "fat")(IDS)
    np.testing.assert_allclose(got(IDS), want, rtol=1e-5, atol=1e-6)
    assert float(jnp.abs(want - load_model(relu)(IDS)).max()) > 1e-4

    each = np.linspace(0.0, 0.05, layers).astype(np.float32)
    got = load_model(relu, "exact", sparsity=write(tmp_path / "each", relu, each, rule="fatrelu"))
    assert [float(block.ffn.threshold[...]) for block in got.blocks] == pytest.approx(each.tolist())


def test_thresholds_of_another_activation_are_refused(tmp_path: Path) -> None:
    relu, drelu = MODELS / "relu-llama", MODELS / "bamboo"
    layers = open_checkpoint(relu).config.num_layers
    silu = write(tmp_path / "a", relu, np.zeros(layers, np.float32), activation="silu", rule="silu")
    with pytest.raises(ValueError, match="was made with activation silu, this model has relu"):
        load_model(relu, "exact", sparsity=silu)
    assert shipped_sparsity(open_checkpoint(relu), tmp_path) is None
    plain = write(tmp_path / "b", relu, np.zeros(layers, np.float32))
    assert shipped_sparsity(open_checkpoint(relu), tmp_path) is not None
    with pytest.raises(ValueError, match="has no effect: activation 'relu' is zero by itself"):
        load_model(relu, "exact", sparsity=plain)
    layers = open_checkpoint(drelu).config.num_layers
    gate = write(tmp_path / "c", drelu, np.zeros(layers, np.float32), rule="fatrelu")
    with pytest.raises(ValueError, match="FATReLU's, this model's activation is drelu"):
        load_model(drelu, "exact", sparsity=gate)
