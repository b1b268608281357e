"""What a GGUF file says about a model: its ``ModelConfig`` and where each canonical weight lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kairox_jax.config import ModelConfig
from kairox_jax.io.errors import FormatError
from kairox_jax.io.gguf_file import GgufFile
from kairox_jax.io.tokenizer import end_token_ids, gguf_adds_bos
from kairox_jax.io.weights import Entry

# Settings that change the result and that this model code does not read: refused unless neutral.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.scaling.type": ("none",),
    "rope.scale_linear": (1.0,),
}


def _get(file: GgufFile, key: str, kind: type, default: Any = None) -> Any:
    value = file.fields.get(key, default)
    if value is None:
        raise FormatError(file.path, key, "missing; every model of this architecture needs it")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise FormatError(file.path, key, f"{value!r} where a value of type {kind.__name__} is expected")
    return value


def gguf_config(file: GgufFile) -> ModelConfig:
    """Read the model's facts from the metadata.

    Raises:
        FormatError: a key is missing or wrong, or asks for something that is not supported.
    """
    arch = _get(file, "general.architecture", str)
    if arch != "llama":
        raise FormatError(file.path, "general.architecture", f"{arch!r} is not supported; expected 'llama'")
    _refuse_unsupported(file, arch)
    num_layers = _get(file, f"{arch}.block_count", int)
    # Bounds the work that a wrong count can cause: each layer has several tensors.
    if not 0 < num_layers <= len(file.tensors):
        raise FormatError(
            file.path, f"{arch}.block_count", f"{num_layers} with {len(file.tensors)} tensors in the file"
        )
    if "token_embd.weight" not in file.tensors:
        raise FormatError(file.path, "token_embd.weight", "missing: the model has no embedding")
    num_heads = _get(file, f"{arch}.attention.head_count", int)
    d_model = _get(file, f"{arch}.embedding_length", int)
    if num_heads <= 0:
        raise FormatError(file.path, f"{arch}.attention.head_count", f"{num_heads} must be above zero")
    head_dim = _get(file, f"{arch}.attention.key_length", int, d_model // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _get(file, f"{arch}.{key}", int, head_dim) != head_dim:
            raise FormatError(
                file.path,
                f"{arch}.{key}",
                f"{file.fields[f'{arch}.{key}']} differs from the head size {head_dim}",
            )
    try:
        return ModelConfig(
            family=arch,
            num_layers=num_layers,
            d_model=d_model,
            num_neurons=_get(file, f"{arch}.feed_forward_length", int),
            num_heads=num_heads,
            num_kv_heads=_get(file, f"{arch}.attention.head_count_kv", int, num_heads),
            head_dim=head_dim,
            vocab_size=file.shapes["token_embd.weight"][0],
            context_length=_get(file, f"{arch}.context_length", int),
            activation="silu",
            norm_eps=_get(file, f"{arch}.attention.layer_norm_rms_epsilon", float),
            rope_theta=_get(file, f"{arch}.rope.freq_base", float, 10000.0),
            tie_embeddings="output.weight" not in file.tensors,
            **_token_facts(file),
        )
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError(file.path, f"{arch}.*", str(error)) from None


def _refuse_unsupported(file: GgufFile, arch: str) -> None:
    for key, neutral in _NEUTRAL.items():
        value = file.fields.get(f"{arch}.{key}")
        # Arrays (a value per layer) are never neutral.
        if value is not None and not (np.ndim(value) == 0 and value in neutral):
            raise FormatError(
                file.path, f"{arch}.{key}", f"{value!r} is not supported: ignoring it would give wrong text"
            )
    if "rope_freqs.weight" in file.tensors:
        raise FormatError(
            file.path,
            "rope_freqs.weight",
            "scaled rotary frequencies (llama3) are not supported in GGUF files",
        )


def _token_facts(file: GgufFile) -> dict[str, Any]:
    if "tokenizer.ggml.tokens" not in file.fields:
        return {}
    bos = file.fields.get("tokenizer.ggml.bos_token_id")
    return {
        "bos_id": None if bos is None else _get(file, "tokenizer.ggml.bos_token_id", int),
        "eos_ids": end_token_ids(file),
        "add_bos": gguf_adds_bos(file),
    }


def half_split_rows(num_heads: int, head_dim: int) -> Callable[[], np.ndarray]:
    """Give the row order that undoes the interleaving of q and k in GGUF llama files.

    There, rows 2i and 2i+1 of a head are a rotary pair; here (as in Hugging Face) i and i + H/2 are.

    Source: ``LlamaModel.permute`` of llama.cpp's converter, inverted.
    """

    def rows() -> np.ndarray:
        order = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2)
        return order.swapaxes(1, 2).reshape(-1)

    return rows


def gguf_entries(config: ModelConfig) -> dict[str, Entry]:
    """Say where each canonical weight of a llama model lies in its GGUF file."""
    dim, ffn = config.d_model, config.num_neurons
    q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q_rows = half_split_rows(config.num_heads, config.head_dim)
    k_rows = half_split_rows(config.num_kv_heads, config.head_dim)
    entries = {
        "embed": Entry(source="token_embd.weight", shape=(config.vocab_size, dim)),
        "out_norm": Entry(source="output_norm.weight", shape=(dim,)),
    }
    if not config.tie_embeddings:
        entries["output"] = Entry(source="output.weight", shape=(config.vocab_size, dim))
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}.", f"blk.{layer}."
        entries |= {
            ours + "attn_norm": Entry(source=theirs + "attn_norm.weight", shape=(dim,)),
            ours + "wq": Entry(source=theirs + "attn_q.weight", shape=(q_dim, dim), rows=q_rows),
            ours + "wk": Entry(source=theirs + "attn_k.weight", shape=(kv_dim, dim), rows=k_rows),
            ours + "wv": Entry(source=theirs + "attn_v.weight", shape=(kv_dim, dim)),
            ours + "wo": Entry(source=theirs + "attn_output.weight", shape=(dim, q_dim)),
            ours + "ffn_norm": Entry(source=theirs + "ffn_norm.weight", shape=(dim,)),
            ours + "w_gate": Entry(source=theirs + "ffn_gate.weight", shape=(ffn, dim)),
            ours + "w_up": Entry(source=theirs + "ffn_up.weight", shape=(ffn, dim)),
            ours + "w_down": Entry(source=theirs + "ffn_down.weight", shape=(dim, ffn), transpose=True),
        }
    return entries
