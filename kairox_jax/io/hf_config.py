"""Read a Hugging Face ``config.json``, in its old and new spellings, as a ``ModelConfig``.

One reader a family; whatever changes the result and is not supported is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kairox_jax.config import ModelConfig
from kairox_jax.io.errors import FormatError
from kairox_jax.io.hf_rope import hf_rope
from kairox_jax.io.json_file import JsonObject, read_json

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "relu_squared": "relu2",
    "squared_relu": "relu2",
    "relu^2": "relu2",
    "fatrelu": "fatrelu",
    "drelu": "drelu",
}
_LLAMA_LIKE = ("llama", "sparsellama", "mistral", "bamboo", "qwen2")
_FALCON = ("falcon", "RefinedWeb", "RefinedWebModel")


def hf_config(folder: Path, *, add_bos: bool) -> ModelConfig:
    """Read ``config.json`` (and ``generation_config.json`` for more EOS tokens).

    Args:
        folder: of the checkpoint.
        add_bos: what the folder's tokenizer does.

    Raises:
        FormatError: a key is missing, wrong or not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FormatError(path, "config.json", "missing: the folder does not say which model this is")
    json = JsonObject(path, read_json(path))
    kind = json.get("model_type", default="")
    json.refuse("quantization_config")
    if any(json.get(key) for key in ("num_local_experts", "num_experts")) or "mixtral" in str(kind):
        raise json.error("model_type", f"{kind!r}: mixtures of experts are not supported yet")
    if kind in _LLAMA_LIKE:
        facts = _llama_like(json, kind)
    elif kind == "opt":
        facts = _opt(json)
    elif kind in _FALCON:
        facts = _falcon(json, kind)
    else:
        known = ", ".join((*_LLAMA_LIKE, "opt", "falcon"))
        raise json.error("model_type", f"{kind!r} is not supported; expected one of {known}")
    try:
        return ModelConfig(**facts, **_end_tokens(json, folder), add_bos=add_bos)
    except FormatError:
        raise
    except (ValueError, TypeError) as error:
        raise json.error("config", str(error)) from None


def _llama_like(json: JsonObject, kind: str) -> dict[str, Any]:
    json.refuse("mlp_bias", False)
    json.refuse("partial_rotary_factor", 1, 1.0)
    num_heads = json.whole("num_attention_heads")
    d_model = json.whole("hidden_size")
    mistral = kind in ("mistral", "bamboo")
    theta, scaling = hf_rope(json)
    activation, threshold = _activation(json, kind)
    bias = kind == "qwen2" or json.flag("attention_bias", False)
    return {
        "family": kind,
        "num_layers": json.whole("num_hidden_layers"),
        "d_model": d_model,
        "num_neurons": json.whole("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": json.whole("num_key_value_heads", default=8 if mistral else num_heads),
        "head_dim": _head_dim(json, d_model, num_heads),
        "vocab_size": json.whole("vocab_size"),
        "context_length": json.whole("max_position_embeddings", default=131072 if mistral else 2048),
        "activation": activation,
        "activation_threshold": threshold,
        "norm_eps": json.number("rms_norm_eps", default=1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "sliding_window": _sliding_window(json, kind),
        "qkv_bias": bias,
        "out_bias": bias and kind != "qwen2",
        "tie_embeddings": json.flag("tie_word_embeddings", False),
    }


def _opt(json: JsonObject) -> dict[str, Any]:
    json.refuse("do_layer_norm_before", True, reason="norms after each part (OPT-350m) are not computed")
    json.refuse("_remove_final_layer_norm", False)
    json.refuse("layer_norm_elementwise_affine", True)
    num_heads, d_model = json.whole("num_attention_heads"), json.whole("hidden_size")
    reason = f"embeddings of another width than hidden_size {d_model} (OPT-350m) are not computed"
    json.refuse("word_embed_proj_dim", d_model, reason=reason)
    activation, threshold = _activation(json, "opt")
    bias = json.flag("enable_bias", True)
    return {
        "family": "opt",
        "num_layers": json.whole("num_hidden_layers"),
        "d_model": d_model,
        "num_neurons": json.whole("ffn_dim"),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": _head_dim(json, d_model, num_heads),
        "vocab_size": json.whole("vocab_size"),
        "context_length": json.whole("max_position_embeddings", default=2048),
        "activation": activation,
        "activation_threshold": threshold,
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "positions": "learned",
        "gated": False,
        "qkv_bias": bias,
        "out_bias": bias,
        "ffn_bias": bias,
        "tie_embeddings": json.flag("tie_word_embeddings", True),
    }


def _falcon(json: JsonObject, kind: str) -> dict[str, Any]:
    json.refuse("alibi", False, reason="attention biases by distance (Falcon-RW) are not computed")
    json.refuse("apply_residual_connection_post_layernorm", False)
    num_heads = json.whole("num_attention_heads", "n_head")
    d_model = json.whole("hidden_size", "n_embed")
    new = falcon_is_new(json.values)
    parallel = json.flag("parallel_attn", True)
    if new and not parallel:
        raise json.error("parallel_attn", "false is not supported with the new decoder layout")
    if new or not json.flag("multi_query", True):
        num_kv_heads = json.whole("num_kv_heads", "n_head_kv", default=num_heads) if new else num_heads
    else:
        num_kv_heads = 1
    theta, scaling = hf_rope(json)
    activation, threshold = _activation(json, "falcon")
    bias = json.flag("bias", False)
    return {
        "family": "falcon",
        "num_layers": json.whole("num_hidden_layers", "n_layer"),
        "d_model": d_model,
        "num_neurons": json.whole("ffn_hidden_size", default=4 * d_model),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": _head_dim(json, d_model, num_heads),
        "vocab_size": json.whole("vocab_size"),
        "context_length": json.whole("max_position_embeddings", default=2048),
        "activation": activation,
        "activation_threshold": threshold,
        "norm": "layernorm",
        "norm_eps": json.number("layer_norm_epsilon", default=1e-5),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "parallel_block": parallel,
        "gated": False,
        "qkv_bias": bias,
        "out_bias": bias,
        "ffn_bias": bias,
        "tie_embeddings": json.flag("tie_word_embeddings", True),
    }


def falcon_is_new(values: dict[str, Any]) -> bool:
    """Say whether a Falcon's q, k and v are fused by groups (40B, 180B) and not in the layout of the 7B.

    Before transformers knew Falcon, the 40B was a ``RefinedWeb`` and had no key for this.
    """
    return bool(values.get("new_decoder_architecture", values.get("model_type") == "RefinedWeb"))


def _head_dim(json: JsonObject, d_model: int, num_heads: int) -> int:
    if json.get("head_dim") is not None:
        return json.whole("head_dim")
    if num_heads <= 0 or d_model % num_heads:
        raise json.error("num_attention_heads", f"{num_heads} does not divide hidden_size {d_model}")
    return d_model // num_heads


def _activation(json: JsonObject, kind: str) -> tuple[str, float]:
    """Return the activation and its threshold."""
    keys = {"opt": ("activation_function",), "falcon": ("activation", "hidden_act")}.get(
        kind, ("hidden_act",)
    )
    default = {"opt": "relu", "falcon": "gelu", "bamboo": "relu"}.get(kind, "silu")
    name = json.get(*keys, default=default)
    given = {str(json.get(key)).lower() for key in keys if json.get(key) is not None}
    if len(given) > 1:
        raise json.error(
            keys[0], f"{name!r} disagrees with {keys[1]} {json.get(keys[1])!r}: keep one of them"
        )
    if not isinstance(name, str) or name.lower() not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        source = "" if given else f", which is what a {kind} without this key computes,"
        raise json.error(keys[0], f"{name!r:.80}{source} is not supported; expected one of {known}")
    activation = _ACTIVATIONS[name.lower()]
    if activation == "fatrelu":
        if json.get("hidden_act_param") is None:
            raise json.error("hidden_act_param", "missing: FATReLU needs its threshold")
        return activation, json.number("hidden_act_param", default=0.0)
    # Bamboo's code applies the activation to gate and up alike; its config just says "relu".
    if activation == "relu" and kind == "bamboo":
        return "drelu", 0.0
    return activation, 0.0


def _sliding_window(json: JsonObject, kind: str) -> int | None:
    if kind in ("mistral", "bamboo"):
        # Early Mistral configs rely on this default; later ones say null for no window.
        window = json.values.get("sliding_window", 4096)
        return None if window is None else json.whole("sliding_window", default=4096)
    if kind != "qwen2" or not json.flag("use_sliding_window", False):
        return None
    num_layers = json.whole("num_hidden_layers")
    types = json.get("layer_types")
    if types is None:
        full = min(json.whole("max_window_layers", default=28), num_layers)
        types = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
    if set(types) == {"full_attention"}:
        return None
    if set(types) != {"sliding_attention"}:
        raise json.error("layer_types", "a sliding window in some layers only is not supported")
    return json.whole("sliding_window", default=4096)


def _end_tokens(json: JsonObject, folder: Path) -> dict[str, Any]:
    """Return BOS, and the EOS tokens of both files: one id or a list."""
    found: list[int] = []
    sources = [json]
    if (folder / "generation_config.json").is_file():
        sources.append(
            JsonObject(folder / "generation_config.json", read_json(folder / "generation_config.json"))
        )
    for source in sources:
        value = source.get("eos_token_id", default=[])
        ids = value if isinstance(value, list) else [value]
        if any(type(i) is not int or i < 0 for i in ids):
            raise source.error("eos_token_id", f"{value!r}: expected an id or a list of ids")
        found += ids
    bos = json.get("bos_token_id")
    return {
        "bos_id": None if bos is None else json.whole("bos_token_id"),
        "eos_ids": tuple(dict.fromkeys(found)),
    }
