"""Configs in old and new spellings: what each asks the decoder to compute, and what is refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy_reference import frequencies

from kairox_jax.config import ModelConfig, RopeScaling
from kairox_jax.io import FormatError
from kairox_jax.io.hf_config import hf_config

MODELS = Path(__file__).parents[1] / "data/models"


def read(tmp_path: Path, base: str, changes: dict[str, Any], without: tuple[str, ...] = ()) -> ModelConfig:
    """Read the config of a case with some keys changed."""
    values = json.loads((MODELS / base / "config.json").read_text()) | changes
    for key in without:
        del values[key]
    (tmp_path / "config.json").write_text(json.dumps(values))
    return hf_config(tmp_path, add_bos=False)


ROPE = ("rope_parameters",)
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 500000.0}, 500000.0, None),
        ({"rope_theta": 500000, "rope_scaling": None}, 500000.0, None),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            10000.0,
            RopeScaling(kind="linear", factor=4.0),
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2}},
            10000.0,
            RopeScaling(kind="linear", factor=2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
            5e5,
            RopeScaling(kind="llama3", factor=8.0, original_context=64),
        ),
        (
            {"rope_scaling": LLAMA3 | {"rope_type": "llama3", "type": "llama3", "factor": 32.0}},
            10000.0,
            RopeScaling(kind="llama3", factor=32.0, original_context=64),
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, 10000.0, RopeScaling(kind="llama3", factor=8.0)),
        ({"rope_scaling": {"rope_type": "default"}}, 10000.0, None),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_theta": 1e4}, 1e6, None),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0}},
            1e6,
            RopeScaling(kind="linear", factor=4.0),
        ),
        (
            {
                "rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0},
                "rope_scaling": {"type": "linear", "factor": 4},
            },
            1e6,
            RopeScaling(kind="linear", factor=4.0),
        ),
    ],
)
def test_rotary(changes: dict[str, Any], theta: float, scaling: RopeScaling | None, tmp_path: Path) -> None:
    config = read(tmp_path, "relu-llama", changes, () if "rope_parameters" in changes else ROPE)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(kind="linear", factor=4.0),
        RopeScaling(kind="llama3", factor=8.0, original_context=64),
        RopeScaling(
            kind="llama3", factor=32.0, low_freq_factor=0.5, high_freq_factor=9.0, original_context=8192
        ),
    ],
)
def test_scaled_frequencies(scaling: RopeScaling, tmp_path: Path) -> None:
    config = read(tmp_path, "relu-llama", {"head_dim": 128})
    plain = frequencies(config)
    want = frequencies(ModelConfig(**{**vars(config), "rope_scaling": scaling}))
    np.testing.assert_allclose(scaling.scale(plain), want, rtol=1e-14)
    assert not np.allclose(want, plain)


@pytest.mark.parametrize(
    ("base", "changes", "activation", "threshold"),
    [
        ("relu-llama", {}, "relu", 0.0),
        ("relu-llama", {"hidden_act": "silu"}, "silu", 0.0),
        ("relu-llama", {"hidden_act": "relu2"}, "relu2", 0.0),
        ("relu-llama", {"hidden_act": "relu_squared"}, "relu2", 0.0),
        ("relu-llama", {"hidden_act": "drelu"}, "drelu", 0.0),
        ("prosparse-llama", {}, "fatrelu", 0.01),
        ("prosparse-llama", {"hidden_act_param": 0.05}, "fatrelu", 0.05),
        ("prosparse-llama", {"hidden_act": "relu"}, "relu", 0.0),
        ("bamboo", {}, "drelu", 0.0),
        ("sparse-qwen2", {}, "drelu", 0.0),
        ("sparse-qwen2", {"hidden_act": "relu"}, "relu", 0.0),
        ("opt", {}, "relu", 0.0),
        ("relu-falcon", {}, "relu", 0.0),
    ],
)
def test_activations(
    base: str, changes: dict[str, Any], activation: str, threshold: float, tmp_path: Path
) -> None:
    config = read(tmp_path, base, changes)
    assert (config.activation, config.activation_threshold) == (activation, threshold)


def test_llama_before_grouped_heads(tmp_path: Path) -> None:
    """The keys of the first LLaMA configs."""
    old = (
        "rope_parameters",
        "num_key_value_heads",
        "head_dim",
        "attention_bias",
        "mlp_bias",
        "pretraining_tp",
    )
    config = read(tmp_path, "relu-llama", {}, old)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10000.0)
    assert not (config.qkv_bias or config.out_bias or config.tie_embeddings)
    assert read(tmp_path, "relu-llama", {"attention_bias": True}).out_bias


@pytest.mark.parametrize(
    ("base", "changes", "without", "window"),
    [
        ("bamboo", {}, (), None),
        ("bamboo", {"model_type": "mistral", "sliding_window": 8}, (), 8),
        ("bamboo", {"model_type": "mistral"}, ("sliding_window",), 4096),
        ("sparse-qwen2", {"sliding_window": 8}, (), None),
        ("sparse-qwen2", {"sliding_window": 8, "use_sliding_window": True}, (), None),
        (
            "sparse-qwen2",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0},
            ("layer_types",),
            8,
        ),
        ("sparse-qwen2", {"sliding_window": 8, "use_sliding_window": True}, ("layer_types",), None),
    ],
)
def test_sliding_window(
    base: str, changes: dict[str, Any], without: tuple[str, ...], window: int | None, tmp_path: Path
) -> None:
    assert read(tmp_path, base, changes, without).sliding_window == window


def test_falcons(tmp_path: Path) -> None:
    new = read(tmp_path, "relu-falcon", {})
    assert (new.num_kv_heads, new.parallel_block, new.gated, new.norm) == (2, True, False, "layernorm")
    small = read(tmp_path, "relu-falcon", {"new_decoder_architecture": False})
    assert small.num_kv_heads == 1 and small.num_neurons == 256
    each = read(
        tmp_path, "relu-falcon", {"new_decoder_architecture": False, "multi_query": False, "bias": True}
    )
    assert (each.num_kv_heads, each.qkv_bias, each.out_bias, each.ffn_bias) == (4, True, True, True)
    serial = read(tmp_path, "relu-falcon", {"new_decoder_architecture": False, "parallel_attn": False})
    assert not serial.parallel_block
    aliases = {"model_type": "RefinedWeb", "n_layer": 3, "n_head": 4, "n_head_kv": 2}
    gone = (
        "num_hidden_layers",
        "num_attention_heads",
        "num_kv_heads",
        "new_decoder_architecture",
        "ffn_hidden_size",
    )
    oldest = read(tmp_path, "relu-falcon", aliases, gone)
    assert (oldest.num_layers, oldest.num_kv_heads, oldest.num_neurons) == (3, 2, 256)


def test_end_tokens_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    config = read(tmp_path, "relu-llama", {})
    assert (config.bos_id, config.eos_ids) == (1, (2, 7))
    assert read(tmp_path, "sparse-qwen2", {}).eos_ids == (7, 2)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (
            "relu-llama",
            {"model_type": "gemma"},
            "model_type: 'gemma' is not supported; expected one of llama",
        ),
        ("relu-llama", {"model_type": None}, "model_type: '' is not supported"),
        ("relu-llama", {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported; expected one of silu"),
        ("relu-llama", {"mlp_bias": True}, "mlp_bias: True is not supported"),
        ("relu-llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
        ("relu-llama", {"quantization_config": {"bits": 4}}, "quantization_config: .* is not supported"),
        ("relu-llama", {"num_hidden_layers": 0}, "num_layers is 0"),
        ("relu-llama", {"num_hidden_layers": "2"}, "num_hidden_layers: '2' is no whole number"),
        ("relu-llama", {"num_attention_heads": True}, "num_attention_heads: True is no whole number"),
        ("relu-llama", {"num_key_value_heads": 3}, "num_heads 4 is no multiple of num_kv_heads 3"),
        ("relu-llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes' is not true or false"),
        ("relu-llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps: '1e-5' is no number"),
        ("relu-llama", {"eos_token_id": "</s>"}, "eos_token_id: '</s>': expected an id"),
        (
            "relu-llama",
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_parameters: .*'yarn' is not supported",
        ),
        (
            "relu-llama",
            {"rope_parameters": {"rope_type": "dynamic"}},
            "'dynamic' is not supported .*length of the text",
        ),
        ("relu-llama", {"rope_parameters": {"rope_type": "new"}}, "'new' is not supported .unknown"),
        ("relu-llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor: missing"),
        (
            "relu-llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 0}},
            "factor 0.0 must be positive",
        ),
        (
            "relu-llama",
            {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "low_freq_factor": 4}},
            "low_freq_factor",
        ),
        ("relu-llama", {"rope_parameters": {"full_attention": {}}}, "one set of values for all layers"),
        (
            "prosparse-llama",
            {"hidden_act_param": None},
            "hidden_act_param: missing: FATReLU needs its threshold",
        ),
        (
            "sparse-qwen2",
            {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            "some layers",
        ),
        (
            "opt",
            {"do_layer_norm_before": False},
            "do_layer_norm_before: False is not supported: norms after each part .OPT-350m",
        ),
        (
            "opt",
            {"word_embed_proj_dim": 32},
            "word_embed_proj_dim: 32 is not supported: embeddings of another width than hidden_size 64",
        ),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm: True is not supported"),
        ("opt", {"hidden_size": 65, "word_embed_proj_dim": 65}, "4 does not divide hidden_size 65"),
        ("relu-falcon", {"alibi": True}, "alibi: True is not supported"),
        (
            "relu-falcon",
            {"activation": None},
            "activation: 'gelu', which is what a falcon without this key computes, is not supported",
        ),
        ("relu-falcon", {"hidden_act": "gelu"}, "activation: 'relu' disagrees with hidden_act 'gelu'"),
        (
            "relu-falcon",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm: True is not supported",
        ),
        (
            "relu-llama",
            {"rope_parameters": {"rope_type": "linear", "type": "llama3", "factor": 2.0}},
            "rope_parameters: rope_type 'linear' disagrees with type 'llama3'",
        ),
        ("relu-llama", {"rms_norm_eps": 10**400}, "rms_norm_eps: a number beyond any use"),
        ("relu-llama", {"vocab_size": 2**31}, "vocab_size is 2147483648: beyond any model"),
        ("relu-falcon", {"parallel_attn": False}, "parallel_attn: false is not supported"),
    ],
)
def test_refuses(base: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message) as error:
        read(tmp_path, base, changes)
    assert str(tmp_path / "config.json") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"), [("", "JSON: broken"), ("{]", "JSON: broken"), ("[]", "not a list")]
)
def test_broken_json(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FormatError, match=message):
        hf_config(tmp_path, add_bos=False)


def test_missing_config(tmp_path: Path) -> None:
    shutil.copy(MODELS / "relu-llama/model.safetensors", tmp_path)
    with pytest.raises(FormatError, match="config.json: missing: the folder does not say which model"):
        hf_config(tmp_path, add_bos=False)


def test_two_rotary_settings_that_disagree_are_refused(tmp_path: Path) -> None:
    changes = {
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    with pytest.raises(FormatError, match="disagrees with rope_parameters"):
        read(tmp_path, "relu-llama", changes, ())


def test_one_of_two_rotary_settings_is_null(tmp_path: Path) -> None:
    new = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_scaling": None}
    assert read(tmp_path, "relu-llama", new).rope_theta == 1e6
    old = {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e4}
    config = read(tmp_path, "relu-llama", old)
    assert (config.rope_theta, config.rope_scaling) == (5e4, RopeScaling(kind="linear", factor=2.0))


def test_turbosparse(tmp_path: Path) -> None:
    """The keys of a published TurboSparse-Mistral: Bamboo's model type, a window, the old rotary key."""
    published = {"sliding_window": 4096, "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}
    published |= {"auto_map": {"AutoConfig": "configuration_bamboo.BambooConfig"}, "rope_theta": 10000.0}
    config = read(tmp_path, "bamboo", published, ("rope_parameters", "dtype", "head_dim"))
    assert (config.activation, config.sliding_window, config.head_dim) == ("drelu", 4096, 16)


def test_the_first_falcons(tmp_path: Path) -> None:
    """The keys of the 7B and the 40B before transformers knew them."""
    gone = ("num_hidden_layers", "num_attention_heads", "num_kv_heads", "new_decoder_architecture")
    gone += ("ffn_hidden_size", "rope_parameters", "num_ln_in_parallel_attn", "max_position_embeddings")
    old = {"n_layer": 2, "n_head": 4, "model_type": "RefinedWebModel", "bias": False, "alibi": False}
    old |= {"apply_residual_connection_post_layernorm": False, "hidden_dropout": 0.0}
    small = read(tmp_path, "relu-falcon", old | {"multi_query": True, "parallel_attn": True}, gone)
    assert (small.num_kv_heads, small.parallel_block, small.context_length) == (1, True, 2048)
    large = read(tmp_path, "relu-falcon", old | {"model_type": "RefinedWeb", "n_head_kv": 2}, gone)
    assert (large.num_kv_heads, large.num_heads, large.num_neurons) == (2, 4, 256)
