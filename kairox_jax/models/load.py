"""Fill Flax modules from a checkpoint, one tensor at a time, without random initial weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from kairox_jax.config import ModelConfig
from kairox_jax.io import load_sparsity, open_checkpoint
from kairox_jax.models.attention import Attention
from kairox_jax.models.decoder import Block, Decoder
from kairox_jax.models.exact import check_mode, find_sparsity, gate_thresholded, resolve_thresholds
from kairox_jax.models.ffn import FFN, Threshold
from kairox_jax.models.norm import Norm

M = TypeVar("M", bound=nnx.Module)


class TensorSource(Protocol):
    """What loading needs of a checkpoint: facts, and float32 tensors by canonical name."""

    @property
    def config(self) -> ModelConfig:
        """The model's facts."""
        ...

    def tensor(self, name: str) -> np.ndarray:
        """Return a fresh float32 array."""
        ...


def abstract(build: Callable[[], M]) -> M:
    """Build a module whose parameters have shapes and no values."""
    return nnx.eval_shape(build)


def _set(module: nnx.Module, name: str, values: np.ndarray) -> None:
    want = getattr(module, name).get_value().shape
    if values.shape != want:
        raise ValueError(
            f"{type(module).__name__}.{name} needs shape {want}, the checkpoint has {values.shape}"
        )
    setattr(module, name, nnx.Param(jnp.asarray(values)))


def _set_optional(module: nnx.Module, source: TensorSource, prefix: str, names: dict[str, str]) -> None:
    """Fill those optional parameters that the config asked for; the others are None and stay so."""
    for ours, theirs in names.items():
        if getattr(module, ours) is not None:
            _set(module, ours, source.tensor(prefix + theirs))


def load_norm(source: TensorSource, name: str) -> Norm[np.ndarray]:
    """Read a norm by the canonical name of its scale, on the host."""
    bias = source.tensor(name + "_bias") if source.config.norm == "layernorm" else None
    return Norm(source.tensor(name), bias)


def load_down_biases(source: TensorSource) -> list[np.ndarray] | None:
    """Read what each layer's FFN adds whichever neurons are active: ``b_down`` [D], or None without biases."""
    if not source.config.ffn_bias:
        return None
    return [source.tensor(f"layers.{layer}.b_down") for layer in range(source.config.num_layers)]


def load_attention(source: TensorSource, layer: int) -> Attention:
    """Load one layer's attention, its q, k and v matrices (and biases) stacked into one."""
    module = abstract(lambda: Attention(source.config, rngs=nnx.Rngs(0)))
    prefix = f"layers.{layer}."
    _set(module, "norm", source.tensor(prefix + "attn_norm"))
    _set(module, "wqkv", np.concatenate([source.tensor(prefix + name) for name in ("wq", "wk", "wv")]))
    _set(module, "wo", source.tensor(prefix + "wo"))
    if module.bqkv is not None:
        _set(module, "bqkv", np.concatenate([source.tensor(prefix + name) for name in ("bq", "bk", "bv")]))
    _set_optional(module, source, prefix, {"norm_bias": "attn_norm_bias", "bo": "bo"})
    return module


def load_ffn(source: TensorSource, layer: int, threshold: float | None) -> FFN:
    """Load one layer's whole FFN onto the device."""
    # The threshold is there from the beginning: Flax takes an attribute that was None as static.
    module = abstract(lambda: FFN(source.config, threshold=threshold, rngs=nnx.Rngs(0)))
    prefix = f"layers.{layer}."
    _set(module, "norm", source.tensor(prefix + "ffn_norm"))
    for name in ("w_gate", "w_up", "w_down") if source.config.gated else ("w_up", "w_down"):
        _set(module, name, source.tensor(prefix + name))
    names = {"norm_bias": "ffn_norm_bias", "b_up": "b_up", "b_down": "b_down"}
    _set_optional(module, source, prefix, names)
    if threshold is not None:
        module.threshold = Threshold(jnp.float32(threshold))
    return module


def load_decoder(source: TensorSource, thresholds: Sequence[float] | None = None) -> Decoder:
    """Load a whole model.

    Args:
        source: an open checkpoint.
        thresholds: one activation threshold a layer; None for the dense function.

    Returns:
        A decoder with every weight on the default device in float32.

    Raises:
        ValueError: a weight is missing or has another shape; thresholds as for ``Decoder``.
    """
    config = source.config
    per_layer = None if thresholds is None else [float(t) for t in thresholds]
    decoder = abstract(lambda: Decoder(config, thresholds=per_layer, rngs=nnx.Rngs(0)))
    _set(decoder, "embed", source.tensor("embed"))
    _set(decoder, "out_norm", source.tensor("out_norm"))
    optional = {name: name for name in ("pos_embed", "out_norm_bias", "output")}
    _set_optional(decoder, source, "", optional)
    for layer in range(config.num_layers):
        block = decoder.blocks[layer]
        assert isinstance(block, Block)
        block.attention = load_attention(source, layer)
        block.ffn = load_ffn(source, layer, None if per_layer is None else per_layer[layer])
    return decoder


def load_model(
    name_or_path: str | Path, mode: str = "dense", *, sparsity: str | Path | None = None
) -> Decoder:
    """Load a model as a Flax NNX module: ``model(ids [B, T]) -> logits [B, T, V]``, float32.

    Args:
        name_or_path: a registered name, a local file or folder, or a Hugging Face repository.
        mode: "dense" computes every neuron; "exact" drops the inactive ones, which for the ReLU family is the
            same function, and for SiLU is that of its thresholds.
        sparsity: folder with thresholds, for "exact"; None takes the shipped ones.

    Returns:
        The module, every weight on the default device.

    Raises:
        ValueError: unknown name or mode; a SiLU model without thresholds; ``sparsity`` without effect.
        FetchError: the model could not be fetched.
        FormatError: its files are broken or not supported.
    """
    check_mode(mode)
    if mode == "predicted":
        raise ValueError(
            "mode 'predicted' is the engine's: use kairox_jax.Engine(..., mode='predicted'), or 'exact' here"
        )
    if mode == "dense" and sparsity is not None:
        raise ValueError(
            f"sparsity {str(sparsity)!r} has no effect in mode 'dense': leave it out, or use 'exact'"
        )
    checkpoint = open_checkpoint(name_or_path)
    if mode == "dense":
        return load_decoder(checkpoint)
    activation = checkpoint.config.activation
    if activation != "silu" and sparsity is not None and "rule" not in load_sparsity(sparsity).meta:
        raise ValueError(
            f"sparsity {str(sparsity)!r} has no effect: activation {activation!r} is zero by itself "
            "where a neuron is inactive; leave it out"
        )
    found = find_sparsity(checkpoint, sparsity)
    checkpoint = gate_thresholded(checkpoint, found)
    if activation != "silu" and (found is None or "rule" not in found.meta):
        return load_decoder(checkpoint)
    return load_decoder(checkpoint, [float(t) for t in resolve_thresholds(checkpoint.config, found)])
