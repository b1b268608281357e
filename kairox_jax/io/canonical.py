"""The canonical weights that a ``ModelConfig`` asks for, and their shapes: what every file reader fills."""

from __future__ import annotations

from kairox_jax.config import ModelConfig


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Give the canonical weights of one layer and their shapes, biases where the config says so."""
    dim, ffn = config.d_model, config.num_neurons
    q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (dim,),
        "wq": (q_dim, dim),
        "wk": (kv_dim, dim),
        "wv": (kv_dim, dim),
        "wo": (dim, q_dim),
        "ffn_norm": (dim,),
        "w_up": (ffn, dim),
        "w_down": (ffn, dim),
    }
    if config.gated:
        shapes |= {"w_gate": (ffn, dim)}
    if config.norm == "layernorm":
        shapes |= {"attn_norm_bias": (dim,), "ffn_norm_bias": (dim,)}
    if config.qkv_bias:
        shapes |= {"bq": (q_dim,), "bk": (kv_dim,), "bv": (kv_dim,)}
    if config.out_bias:
        shapes |= {"bo": (dim,)}
    if config.ffn_bias:
        shapes |= {"b_up": (ffn,), "b_down": (dim,)}
    return shapes
