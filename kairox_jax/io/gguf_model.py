"""Where each canonical weight lies in a GGUF file: one table of names, by the tensors that the file holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np

from kairox_jax.config import ModelConfig
from kairox_jax.io.canonical import layer_shapes
from kairox_jax.io.errors import FormatError
from kairox_jax.io.gguf_arch import ARCHITECTURES, GgufArch
from kairox_jax.io.gguf_config import position_rows
from kairox_jax.io.gguf_fields import get_field
from kairox_jax.io.gguf_file import GgufFile
from kairox_jax.io.weights import Entry

Rows = Callable[[], np.ndarray]

_NAMES = {
    "attn_norm": "attn_norm.weight",
    "attn_norm_bias": "attn_norm.bias",
    "wq": "attn_q.weight",
    "wk": "attn_k.weight",
    "wv": "attn_v.weight",
    "wo": "attn_output.weight",
    "ffn_norm": "ffn_norm.weight",
    "ffn_norm_bias": "ffn_norm.bias",
    "w_gate": "ffn_gate.weight",
    "w_up": "ffn_up.weight",
    "w_down": "ffn_down.weight",
    "bq": "attn_q.bias",
    "bk": "attn_k.bias",
    "bv": "attn_v.bias",
    "bo": "attn_output.bias",
    "b_up": "ffn_up.bias",
    "b_down": "ffn_down.bias",
}
_FUSED = {name: "attn_qkv.weight" for name in ("wq", "wk", "wv")}
_FUSED |= {name: "attn_qkv.bias" for name in ("bq", "bk", "bv")}
# Tensors without effect on the result: rotary tables, our own, and the predictors of kairox.cpp, which read
# another input than PowerInfer's.
GGUF_IGNORED = re.compile(r"kairox\.|rope_freqs\.weight$|blk\.\d+\.(attn_rot_embd|ffn_pred_(up|down))\.")


def half_split_rows(num_heads: int, head_dim: int) -> Rows:
    """Give the row order that undoes the interleaving of q and k in GGUF llama files.

    There, rows 2i and 2i+1 of a head are a rotary pair; here (as in Hugging Face) i and i + H/2 are.

    Source: ``LlamaModel.permute`` of llama.cpp's converter, inverted.
    """

    def rows() -> np.ndarray:
        order = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
        return order.swapaxes(1, 2).reshape(-1)

    return rows


def gguf_entries(file: GgufFile, config: ModelConfig) -> dict[str, Entry]:
    """Say where each canonical weight lies in the file that ``config`` was read from.

    Raises:
        FormatError: predictors in some layers only, or of shapes that do not fit.
    """
    arch = ARCHITECTURES[config.family]
    dim = config.d_model
    entries = {
        "embed": Entry(source="token_embd.weight", shape=(config.vocab_size, dim)),
        "out_norm": Entry(source="output_norm.weight", shape=(dim,)),
    }
    if config.norm == "layernorm":
        entries["out_norm_bias"] = Entry(source="output_norm.bias", shape=(dim,))
    if not config.tie_embeddings:
        entries["output"] = Entry(source="output.weight", shape=(config.vocab_size, dim))
    if config.positions == "learned":
        first, count = position_rows(file, config.family)
        entries["pos_embed"] = Entry(
            source="position_embd.weight",
            shape=(first + count, dim),
            rows=partial(np.arange, first, first + count),
        )
    rows = _rows(config, arch)
    for layer in range(config.num_layers):
        entries |= _layer_entries(file, config, arch, rows, layer)
    return entries | _predictor_entries(file, config)


def sparse_threshold(file: GgufFile, entries: dict[str, Entry]) -> float | None:
    """Return the raw score from which a PowerInfer predictor keeps a neuron; None without predictors.

    Raises:
        FormatError: it is not a finite number.

    Source: PowerInfer, ``sparse_pred_threshold``, 0 where the file names none.
    """
    if "layers.0.pred_fc1" not in entries:
        return None
    key = "powerinfer.sparse_threshold"
    value = get_field(file, key, float, 0.0)
    if not np.isfinite(value):
        raise FormatError(file.path, key, f"{value} is not finite")
    return value


def _rows(config: ModelConfig, arch: GgufArch) -> dict[str, Rows]:
    """Give the rows to take for q, k and v where they are interleaved or in one tensor."""
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if arch.fused:
        ends = np.cumsum([0, q_rows, kv_rows, kv_rows]).tolist()
        parts = [partial(np.arange, first, last) for first, last in zip(ends, ends[1:], strict=False)]
        names = (("wq", "bq"), ("wk", "bk"), ("wv", "bv"))
        return {name: part for pair, part in zip(names, parts, strict=True) for name in pair}
    if not arch.interleaved:
        return {}
    q, k = (
        half_split_rows(config.num_heads, config.head_dim),
        half_split_rows(config.num_kv_heads, config.head_dim),
    )
    return {"wq": q, "bq": q, "wk": k, "bk": k}


def _layer_entries(
    file: GgufFile, config: ModelConfig, arch: GgufArch, rows: dict[str, Rows], layer: int
) -> dict[str, Entry]:
    prefix = f"blk.{layer}."
    fused_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    names = _layer_names(file, arch, prefix)
    entries: dict[str, Entry] = {}
    for name, shape in layer_shapes(config).items():
        source = prefix + names[name]
        if arch.fused and name in _FUSED:
            shape = (fused_rows, *shape[1:])
        # Files for sparse engines keep the down matrix by neuron; kairox.cpp's do so under the usual name.
        by_neuron = "ffn_down_t" in source or f"{prefix}ffn_pred_up.weight" in file.tensors
        transpose = name == "w_down" and not by_neuron
        entries[f"layers.{layer}.{name}"] = Entry(
            source=source, shape=shape[::-1] if transpose else shape, rows=rows.get(name), transpose=transpose
        )
    return entries


def _layer_names(file: GgufFile, arch: GgufArch, prefix: str) -> dict[str, str]:
    names = dict(_NAMES)
    if arch.fused:
        names |= _FUSED
    if arch.parallel_block:
        # One norm for both parts, or (40B) one each: then attn_norm_2 is attention's.
        attention = "attn_norm_2" if f"{prefix}attn_norm_2.weight" in file.tensors else "attn_norm"
        names |= {"attn_norm": f"{attention}.weight", "attn_norm_bias": f"{attention}.bias"}
        names |= {"ffn_norm": "attn_norm.weight", "ffn_norm_bias": "attn_norm.bias"}
    for name, by_neuron in (("w_down", "ffn_down_t.weight"), ("b_down", "ffn_down_t.bias")):
        if prefix + by_neuron in file.tensors:
            names[name] = by_neuron
    return names


def _predictor_entries(file: GgufFile, config: ModelConfig) -> dict[str, Entry]:
    """Give PowerInfer's predictors: ``fc1`` [R, D] and ``fc2`` [F, R], R of its own in each layer."""
    entries: dict[str, Entry] = {}
    found = [f"blk.{layer}.fc1.weight" in file.tensors for layer in range(config.num_layers)]
    if not any(found):
        return entries
    for layer in range(config.num_layers):
        first, second = f"blk.{layer}.fc1.weight", f"blk.{layer}.fc2.weight"
        if not found[layer] or len(file.shapes[first]) != 2:
            raise FormatError(file.path, first, "missing or no matrix, while other layers have a predictor")
        rank = file.shapes[first][0]
        entries[f"layers.{layer}.pred_fc1"] = Entry(source=first, shape=(rank, config.d_model))
        entries[f"layers.{layer}.pred_fc2"] = Entry(source=second, shape=(config.num_neurons, rank))
    return entries
