"""Fill Flax modules from a checkpoint, one tensor at a time, without random initial weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from kairox_jax.config import ModelConfig
from kairox_jax.models.attention import Attention
from kairox_jax.models.decoder import Block, Decoder
from kairox_jax.models.ffn import FFN, Threshold

M = TypeVar("M", bound=nnx.Module)


class TensorSource(Protocol):
    """What loading needs of a checkpoint: facts, and float32 tensors by canonical name."""

    config: ModelConfig

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


def load_attention(source: TensorSource, layer: int) -> Attention:
    """Load one layer's attention, its q, k and v matrices stacked into one."""
    module = abstract(lambda: Attention(source.config, rngs=nnx.Rngs(0)))
    prefix = f"layers.{layer}."
    _set(module, "norm", source.tensor(prefix + "attn_norm"))
    _set(module, "wqkv", np.concatenate([source.tensor(prefix + name) for name in ("wq", "wk", "wv")]))
    _set(module, "wo", source.tensor(prefix + "wo"))
    return module


def load_ffn(source: TensorSource, layer: int, threshold: float | None) -> FFN:
    """Load one layer's whole FFN onto the device."""
    module = abstract(lambda: FFN(source.config, threshold=None, rngs=nnx.Rngs(0)))
    _set(module, "norm", source.tensor(f"layers.{layer}.ffn_norm"))
    for name in ("w_gate", "w_up", "w_down"):
        _set(module, name, source.tensor(f"layers.{layer}.{name}"))
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
    """
    config = source.config
    decoder = abstract(lambda: Decoder(config, thresholds=thresholds, rngs=nnx.Rngs(0)))
    _set(decoder, "embed", source.tensor("embed"))
    _set(decoder, "out_norm", source.tensor("out_norm"))
    if not config.tie_embeddings:
        _set(decoder, "output", source.tensor("output"))
    for layer in range(config.num_layers):
        block = decoder.blocks[layer]
        assert isinstance(block, Block)
        block.attention = load_attention(source, layer)
        block.ffn = load_ffn(source, layer, None if thresholds is None else float(thresholds[layer]))
    return decoder
