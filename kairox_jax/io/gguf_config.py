"""What a GGUF file's metadata and tensor shapes say about its model, as a ``ModelConfig``."""

from __future__ import annotations

from typing import Any

import numpy as np

from kairox_jax.config import ModelConfig
from kairox_jax.io.errors import FormatError
from kairox_jax.io.gguf_activation import GgufActivation
from kairox_jax.io.gguf_arch import ARCHITECTURES, GgufArch
from kairox_jax.io.gguf_fields import get_field
from kairox_jax.io.gguf_file import GgufFile
from kairox_jax.io.gguf_rope import gguf_rope_scaling
from kairox_jax.io.gguf_tokenizer import end_token_ids, gguf_adds_bos

# Settings that change the result and that this model code does not read: refused unless neutral.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.causal": (True,),
    "attention.sliding_window_pattern": (),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "use_parallel_residual": (True,),
}
# OPT's table of positions begins with two rows that no position uses; some converters drop them.
OPT_OFFSET = 2


def gguf_arch(file: GgufFile) -> tuple[str, GgufArch]:
    """Return the file's architecture, by name and by its facts.

    Raises:
        FormatError: it is not supported, or the file is one of several parts.
    """
    name = get_field(file, "general.architecture", str)
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise FormatError(
            file.path, "general.architecture", f"{name!r} is not supported; expected one of {known}"
        )
    if get_field(file, "split.count", int, 1) > 1:
        raise FormatError(
            file.path,
            "split.count",
            "the file is a part of a model: join the parts with `gguf-split --merge`",
        )
    return name, ARCHITECTURES[name]


def gguf_config(file: GgufFile, activation: GgufActivation) -> ModelConfig:
    """Read the model's facts.

    Args:
        file: an open file.
        activation: what ``gguf_activation`` decided.

    Raises:
        FormatError: a key is missing or wrong, or asks for something that is not supported.
    """
    name, arch = gguf_arch(file)
    _refuse_unsupported(file, name)
    num_layers = get_field(file, f"{name}.block_count", int)
    # Bounds the work that a wrong count can cause: each layer has several tensors.
    if not 0 < num_layers <= len(file.tensors):
        raise FormatError(
            file.path, f"{name}.block_count", f"{num_layers} with {len(file.tensors)} tensors in the file"
        )
    for tensor in ("token_embd.weight", *(["position_embd.weight"] if arch.positions == "learned" else [])):
        if len(file.shapes.get(tensor, ())) != 2:
            raise FormatError(file.path, tensor, "missing or no matrix: the model has no embedding")
    num_heads = get_field(file, f"{name}.attention.head_count", int)
    d_model = get_field(file, f"{name}.embedding_length", int)
    if num_heads <= 0:
        raise FormatError(file.path, f"{name}.attention.head_count", f"{num_heads} must be above zero")
    head_dim = _head_dim(file, name, d_model // num_heads)
    window = get_field(file, f"{name}.attention.sliding_window", int, 0)
    try:
        return ModelConfig(
            family=name,
            num_layers=num_layers,
            d_model=d_model,
            num_neurons=get_field(file, f"{name}.feed_forward_length", int),
            num_heads=num_heads,
            num_kv_heads=get_field(file, f"{name}.attention.head_count_kv", int, num_heads),
            head_dim=head_dim,
            vocab_size=file.shapes["token_embd.weight"][0],
            context_length=_context_length(file, name, arch),
            activation=activation.name,
            activation_threshold=activation.threshold,
            norm=arch.norm,
            norm_eps=get_field(file, f"{name}.{arch.norm_eps_key}", float, arch.norm_eps),
            positions=arch.positions,
            rope_theta=get_field(file, f"{name}.rope.freq_base", float, 10000.0),
            rope_scaling=None if arch.positions == "learned" else gguf_rope_scaling(file, name, head_dim),
            sliding_window=window or None,
            parallel_block=arch.parallel_block,
            gated=arch.gated,
            qkv_bias=_has_bias(file, "attn_qkv" if arch.fused else "attn_q"),
            out_bias=_has_bias(file, "attn_output"),
            ffn_bias=_has_bias(file, "ffn_up"),
            tie_embeddings="output.weight" not in file.tensors,
            **_token_facts(file),
        )
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError(file.path, f"{name}.*", str(error)) from None


def position_rows(file: GgufFile, arch: str) -> tuple[int, int]:
    """Say which rows of ``position_embd`` are positions: the first one, and how many.

    PowerInfer keeps OPT's two unused rows and counts them as context; other converters drop them, or keep them
    beside a context without them.

    Raises:
        FormatError: the table does not fit ``{arch}.context_length``.
    """
    rows, context = file.shapes["position_embd.weight"][0], get_field(file, f"{arch}.context_length", int)
    if rows == context + OPT_OFFSET or (file.is_powerinfer and rows == context > OPT_OFFSET):
        return OPT_OFFSET, rows - OPT_OFFSET
    if rows == context and not file.is_powerinfer:
        return 0, rows
    raise FormatError(
        file.path, f"{arch}.context_length", f"{context} does not fit the {rows} rows of position_embd.weight"
    )


def _context_length(file: GgufFile, name: str, arch: GgufArch) -> int:
    if arch.positions == "learned":
        return position_rows(file, name)[1]
    return get_field(file, f"{name}.context_length", int)


def _head_dim(file: GgufFile, arch: str, default: int) -> int:
    head_dim = get_field(file, f"{arch}.attention.key_length", int, default)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get_field(file, f"{arch}.{key}", int, head_dim) != head_dim:
            raise FormatError(
                file.path,
                f"{arch}.{key}",
                f"{file.fields[f'{arch}.{key}']} differs from the head size {head_dim}",
            )
    return head_dim


def _has_bias(file: GgufFile, name: str) -> bool:
    return f"blk.0.{name}.bias" in file.tensors


def _refuse_unsupported(file: GgufFile, arch: str) -> None:
    for key, neutral in _NEUTRAL.items():
        value = file.fields.get(f"{arch}.{key}")
        # Arrays (a value per layer) are never neutral.
        if value is not None and not (np.ndim(value) == 0 and value in neutral):
            shown = str(value).replace("\n", " ")[:80]
            raise FormatError(
                file.path, f"{arch}.{key}", f"{shown} is not supported: ignoring it would give wrong text"
            )
    layout = file.fields.get(f"{arch}.tensor_data_layout", "jploski")
    if ARCHITECTURES[arch].fused and layout != "jploski":
        raise FormatError(
            file.path,
            f"{arch}.tensor_data_layout",
            f"{str(layout)[:80]!r} is not supported; expected 'jploski'",
        )


def _token_facts(file: GgufFile) -> dict[str, Any]:
    if "tokenizer.ggml.tokens" not in file.fields:
        return {}
    bos = file.fields.get("tokenizer.ggml.bos_token_id")
    return {
        "bos_id": None if bos is None else get_field(file, "tokenizer.ggml.bos_token_id", int),
        "eos_ids": end_token_ids(file),
        "add_bos": gguf_adds_bos(file),
    }
