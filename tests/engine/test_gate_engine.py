"""The engine runs a ReLU model under thresholds on its gate as the Flax model does."""

import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from kairox_jax import Engine, GenerationConfig, PlacementConfig, load_model
from kairox_jax.io import Sparsity, fingerprint, open_checkpoint, save_sparsity

RELU = Path(__file__).parents[1] / "data" / "models" / "relu-llama"


def test_thresholds_on_the_gate_reach_the_engine(tmp_path: Path) -> None:
    model_path = tmp_path / "model"
    shutil.copytree(RELU, model_path)
    vocabulary = open_checkpoint(RELU).config.vocab_size
    letters = Tokenizer(models.BPE(vocab={chr(0x100 + i): i for i in range(vocabulary)}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.save(str(model_path / "tokenizer.json"))
    source = open_checkpoint(model_path)
    layers, neurons = source.config.num_layers, source.config.num_neurons
    rng = np.random.default_rng(0)
    meta = {
        "fingerprint": fingerprint(source),
        "num_neurons": neurons,
        "rule": "fatrelu",
        "activation": "relu",
    }
    frequency = rng.random((layers, neurons))
    save_sparsity(tmp_path, Sparsity(np.linspace(0.02, 0.05, layers), frequency, meta))
    model = load_model(model_path, "exact", sparsity=tmp_path)
    plain = load_model(model_path)
    with Engine(
        model_path, sparsity=tmp_path, context_length=32, placement=PlacementConfig(gpu_cache_neurons=16)
    ) as engine:
        assert engine.config.activation == "fatrelu"
        result = engine.generate([5, 9, 20], GenerationConfig(max_tokens=8, temperature=0.0))
    ids, differs = [5, 9, 20], False
    assert result.token_ids
    for token in result.token_ids[:8]:
        logits = model(jnp.array([ids]))[0, -1]
        assert float(logits.max() - logits[token]) < 1e-4
        differs |= bool(jnp.abs(logits - plain(jnp.array([ids]))[0, -1]).max() > 1e-3)
        ids.append(token)
    assert differs
