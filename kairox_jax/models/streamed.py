"""Logits and active neurons of a sample, layer by layer: needs memory for one layer, not for the model."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kairox_jax.config import ModelConfig
from kairox_jax.models.ffn import FFN
from kairox_jax.models.load import TensorSource, load_attention, load_ffn
from kairox_jax.models.norm import normalise

TABLE_ROWS = 8192  # of the output matrix, on the device at a time


@nnx.jit
def _attend(attention: nnx.Module, x: Array, start: Array) -> Array:
    return attention(x, start)[0]  # type: ignore[operator]


@nnx.jit
def _feed(ffn: FFN, x: Array) -> tuple[Array, Array]:
    z, active = ffn.values(ffn.normalise(x))
    y = z @ ffn.w_down[...]
    return (y if ffn.b_down is None else y + ffn.b_down[...][None, None, :]), active


def streamed_logits(
    source: TensorSource,
    ids: Int[np.ndarray, "B T"],
    *,
    thresholds: Float[np.ndarray, " L"] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> tuple[Float[np.ndarray, "B T V"], float]:
    """Compute a model's logits with one layer in memory at a time.

    Args:
        source: an open checkpoint.
        ids: token ids.
        thresholds: of activation, one a layer; None for the dense function.
        progress: called after each layer.

    Returns:
        The logits, float32, and the share of neurons that were active.
    """
    config = source.config
    start = jnp.zeros(ids.shape[:1], jnp.int32)
    x, num_active = _embedding(source, ids), 0
    for layer in range(config.num_layers):
        attended = _attend(load_attention(source, layer), x, start)
        threshold = None if thresholds is None else float(thresholds[layer])
        ffn = load_ffn(source, layer, threshold)
        merged = x + attended
        y, active = _feed(ffn, x if config.parallel_block else merged)
        x = merged + y
        num_active += int(active.sum())
        progress()
    share = num_active / (config.num_layers * config.num_neurons * ids.size)
    return _logits(source, config, x), share


def _embedding(source: TensorSource, ids: Int[np.ndarray, "B T"]) -> Float[Array, "B T D"]:
    x = source.tensor("embed")[ids]
    if source.config.positions == "learned":
        x = x + source.tensor("pos_embed")[None, : ids.shape[1]]
    return jnp.asarray(x)


def _logits(
    source: TensorSource, config: ModelConfig, x: Float[Array, "B T D"]
) -> Float[np.ndarray, "B T V"]:
    bias = jnp.asarray(source.tensor("out_norm_bias")) if config.norm == "layernorm" else None
    x = normalise(x, jnp.asarray(source.tensor("out_norm")), bias, config.norm_eps)
    table = source.tensor("embed" if config.tie_embeddings else "output")
    parts = [x @ jnp.asarray(table[row : row + TABLE_ROWS]).T for row in range(0, len(table), TABLE_ROWS)]
    return np.concatenate([np.asarray(part) for part in parts], axis=-1)
