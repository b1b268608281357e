"""Where each canonical weight of a Hugging Face checkpoint lies: one table of names a family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from kairox_jax.config import ModelConfig
from kairox_jax.io.canonical import layer_shapes
from kairox_jax.io.weights import Entry

Shapes = Mapping[str, tuple[int, ...]]

_LLAMA = {
    "attn_norm": "input_layernorm.weight",
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "w_gate": "mlp.gate_proj.weight",
    "w_up": "mlp.up_proj.weight",
    "w_down": "mlp.down_proj.weight",
    "bq": "self_attn.q_proj.bias",
    "bk": "self_attn.k_proj.bias",
    "bv": "self_attn.v_proj.bias",
    "bo": "self_attn.o_proj.bias",
}
_OPT = {
    "attn_norm": "self_attn_layer_norm.weight",
    "attn_norm_bias": "self_attn_layer_norm.bias",
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.out_proj.weight",
    "ffn_norm": "final_layer_norm.weight",
    "ffn_norm_bias": "final_layer_norm.bias",
    "w_up": "fc1.weight",
    "w_down": "fc2.weight",
    "bq": "self_attn.q_proj.bias",
    "bk": "self_attn.k_proj.bias",
    "bv": "self_attn.v_proj.bias",
    "bo": "self_attn.out_proj.bias",
    "b_up": "fc1.bias",
    "b_down": "fc2.bias",
}
_FALCON = {
    "wq": "self_attention.query_key_value.weight",
    "wk": "self_attention.query_key_value.weight",
    "wv": "self_attention.query_key_value.weight",
    "wo": "self_attention.dense.weight",
    "w_up": "mlp.dense_h_to_4h.weight",
    "w_down": "mlp.dense_4h_to_h.weight",
    "bq": "self_attention.query_key_value.bias",
    "bk": "self_attention.query_key_value.bias",
    "bv": "self_attention.query_key_value.bias",
    "bo": "self_attention.dense.bias",
    "b_up": "mlp.dense_h_to_4h.bias",
    "b_down": "mlp.dense_4h_to_h.bias",
}
# Tensors without effect on the result: buffers of older transformers versions, an output matrix beside tied
# embeddings, and the predictors inside TurboSparse's FFN, whose use is not published.
HF_IGNORED = re.compile(
    r".*\.rotary_emb\.inv_freq$|.*\.masked_bias$|(transformer\.)?h\.\d+\.self_attention\.bias$|lm_head\.weight$"
    r"|.*\.mlp\.predictor\."
)
# OPT's table of positions begins with two rows that no position uses.
_OPT_OFFSET = 2


def hf_entries(config: ModelConfig, shapes: Shapes) -> dict[str, Entry]:
    """Say where each canonical weight lies.

    Args:
        config: the model's facts.
        shapes: of the tensors in the files: prefixes and some layouts can only be seen there.
    """
    if config.family == "opt":
        return _opt_entries(config, shapes)
    if config.family == "falcon":
        return _falcon_entries(config, shapes)
    prefix = _prefix(shapes, "embed_tokens.weight", "model.", "")
    table = {
        name: Entry(source=prefix + source, shape=shape)
        for name, source, shape in (
            ("embed", "embed_tokens.weight", (config.vocab_size, config.d_model)),
            ("out_norm", "norm.weight", (config.d_model,)),
        )
    }
    return table | _output(config) | _layers(config, prefix + "layers.", lambda layer: _LLAMA)


def _opt_entries(config: ModelConfig, shapes: Shapes) -> dict[str, Entry]:
    prefix = _prefix(shapes, "embed_tokens.weight", "model.decoder.", "decoder.", "")
    dim, positions = config.d_model, config.context_length
    table = {
        "embed": Entry(source=prefix + "embed_tokens.weight", shape=(config.vocab_size, dim)),
        "pos_embed": Entry(
            source=prefix + "embed_positions.weight",
            shape=(positions + _OPT_OFFSET, dim),
            rows=partial(np.arange, _OPT_OFFSET, positions + _OPT_OFFSET),
        ),
        "out_norm": Entry(source=prefix + "final_layer_norm.weight", shape=(dim,)),
        "out_norm_bias": Entry(source=prefix + "final_layer_norm.bias", shape=(dim,)),
    }
    return table | _output(config) | _layers(config, prefix + "layers.", lambda layer: _OPT)


def _falcon_entries(config: ModelConfig, shapes: Shapes) -> dict[str, Entry]:
    prefix = _prefix(shapes, "word_embeddings.weight", "transformer.", "")
    table = {
        "embed": Entry(source=prefix + "word_embeddings.weight", shape=(config.vocab_size, config.d_model)),
        "out_norm": Entry(source=prefix + "ln_f.weight", shape=(config.d_model,)),
        "out_norm_bias": Entry(source=prefix + "ln_f.bias", shape=(config.d_model,)),
    }

    def names(layer: int) -> dict[str, str]:
        if f"{prefix}h.{layer}.ln_attn.weight" in shapes:
            norms = ("ln_attn", "ln_mlp")
        elif config.parallel_block:
            norms = ("input_layernorm", "input_layernorm")
        else:
            norms = ("input_layernorm", "post_attention_layernorm")
        pairs = zip(("attn_norm", "ffn_norm"), norms, strict=True)
        return _FALCON | {
            ours + end: theirs + kind
            for ours, theirs in pairs
            for end, kind in (("", ".weight"), ("_bias", ".bias"))
        }

    return table | _output(config) | _layers(config, prefix + "h.", names, fused=True)


def _prefix(shapes: Shapes, name: str, *prefixes: str) -> str:
    """Return the prefix under which this tensor is found; the first one where it is not."""
    return next((prefix for prefix in prefixes if prefix + name in shapes), prefixes[0])


def _output(config: ModelConfig) -> dict[str, Entry]:
    if config.tie_embeddings:
        return {}
    return {"output": Entry(source="lm_head.weight", shape=(config.vocab_size, config.d_model))}


def _layers(
    config: ModelConfig, prefix: str, names: Callable[[int], dict[str, str]], *, fused: bool = False
) -> dict[str, Entry]:
    shapes = layer_shapes(config)
    rows = _fused_rows(config) if fused else {}
    fused_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    entries: dict[str, Entry] = {}
    for layer in range(config.num_layers):
        for name, source in names(layer).items():
            if name not in shapes:
                continue
            shape = shapes[name]
            if name in rows:
                shape = (fused_rows, *shape[1:])
            entries[f"layers.{layer}.{name}"] = Entry(
                source=f"{prefix}{layer}.{source}",
                shape=shape[::-1] if name == "w_down" else shape,
                rows=rows.get(name),
                transpose=name == "w_down",
            )
    return entries


def _fused_rows(config: ModelConfig) -> dict[str, Callable[[], np.ndarray]]:
    """Find q, k and v in Falcon's fused matrix: for each kv head its query heads, then k, then v.

    The three layouts of Falcon (grouped, one kv head for all, one for each) are this with K groups.
    """
    num_kv, head = config.num_kv_heads, config.head_dim
    group = config.num_heads // num_kv

    def rows(first: int, count: int) -> np.ndarray:
        index = np.arange((group + 2) * num_kv * head).reshape(num_kv, group + 2, head)
        return index[:, first : first + count].reshape(-1)

    q, k, v = partial(rows, 0, group), partial(rows, group, 1), partial(rows, group + 1, 1)
    return {"wq": q, "wk": k, "wv": v, "bq": q, "bk": k, "bv": v}
