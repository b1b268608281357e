"""Run a model layer by layer over token windows: losses, active neurons, |z| histograms, loss sensitivities.

One compiled function serves all layers, so that compiling takes seconds, and only the residual stream of one
batch is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kairox_jax.config import ModelConfig
from kairox_jax.models import Block, Decoder, neuron_values, rms_norm
from training.statistics import BINS, BINS_PER_OCTAVE, LEAST_OCTAVE

KEEP_ALL = -1.0  # a threshold that every |z| exceeds: the dense function
ROWS = 256  # positions whose logits are held at a time


class Head(NamedTuple):
    """Final norm's scale [D] and output matrix [V, D]."""

    norm: Float[Array, " D"]
    table: Float[Array, "V D"]


@dataclass(frozen=True)
class LayeredModel:
    """A dense decoder, split into functions and one tuple of weights a layer."""

    config: ModelConfig
    graph: Any
    layers: tuple[Any, ...]
    embed: Float[Array, "V D"]
    head: Head


def layered(decoder: Decoder) -> LayeredModel:
    """Split a dense decoder for layer-by-layer use."""
    parts = [nnx.split(block) for block in decoder.blocks]
    table = decoder.embed if decoder.output is None else decoder.output
    head = Head(decoder.out_norm[...], table[...])
    layers = tuple(state for _, state in parts)
    return LayeredModel(decoder.config, parts[0][0], layers, decoder.embed[...], head)


def _ffn_values(block: Block, x: Array, threshold: Array) -> tuple[Array, Array]:
    h = block.ffn.normalise(x)
    assert block.ffn.w_gate is not None  # thresholds are for gated SiLU models; the command checks it
    gate, up = h @ block.ffn.w_gate[...].T, h @ block.ffn.w_up[...].T
    return neuron_values(gate, up, block.ffn.config.activation, threshold)


def _attend(block: Block, x: Array) -> Array:
    return x + block.attention(x, jnp.zeros(x.shape[:1], jnp.int32))[0]


@partial(jax.jit, static_argnums=0)
def run_layer(
    graph: Any, state: Any, x: Float[Array, "B T D"], threshold: Float[Array, ""]
) -> tuple[Float[Array, "B T D"], Int[Array, " F"]]:
    """Return the residual stream after a layer and how many tokens each neuron was active for."""
    block = nnx.merge(graph, state)
    x = _attend(block, x)
    z, active = _ffn_values(block, x, threshold)
    return x + z @ block.ffn.w_down[...], active.sum((0, 1))


@partial(jax.jit, static_argnums=0)
def histogram_layer(
    graph: Any, state: Any, x: Float[Array, "B T D"]
) -> tuple[Float[Array, "B T D"], Int[Array, " bins"]]:
    """Return the residual stream after a dense layer and the histogram of log2 |z|."""
    block = nnx.merge(graph, state)
    x = _attend(block, x)
    z, _ = _ffn_values(block, x, jnp.float32(KEEP_ALL))
    octave = jnp.log2(jnp.maximum(jnp.abs(z), 1e-30))
    place = jnp.clip(jnp.floor((octave - LEAST_OCTAVE) * BINS_PER_OCTAVE), 0, BINS - 1).astype(jnp.int32)
    return x + z @ block.ffn.w_down[...], jnp.bincount(place.reshape(-1), length=BINS)


@partial(jax.jit, static_argnums=0)
def sensitivity_layer(
    graph: Any,
    state: Any,
    x: Float[Array, "B T D"],
    grad: Float[Array, "B T D"],
    edges: Float[Array, " J"],
) -> tuple[Float[Array, "B T D"], Float[Array, " J"]]:
    """Pull a gradient back through a dense layer, and estimate what thresholds at ``edges`` would cost there.

    Dropping the neurons with |z| <= edge changes the layer's output by d; with the gradient g of the token's
    loss, the divergence from the dense model is 1/2 E[(g . d)^2] to second order (Fisher information, with
    the labels of the text instead of labels drawn from the model).

    Returns:
        The gradient at the layer's input, and the sum over tokens of 1/2 (g . d)^2 for each edge.
    """
    block = nnx.merge(graph, state)

    def whole(x: Array) -> tuple[Array, Array]:
        x = _attend(block, x)
        z, _ = _ffn_values(block, x, jnp.float32(KEEP_ALL))
        return x + z @ block.ffn.w_down[...], z

    _, pull, z = jax.vjp(whole, x, has_aux=True)
    share = z * (grad @ block.ffn.w_down[...].T)  # [B, T, F], g . (neuron's part of the output)
    size = jnp.abs(z)

    def cost(edge: Array) -> Array:
        return 0.5 * jnp.square(jnp.where(size <= edge, share, 0).sum(-1)).sum()

    return pull(grad)[0], jax.lax.map(cost, edges)


@partial(jax.jit, static_argnums=0)
def token_losses(
    eps: float, head: Head, x: Float[Array, "B T D"], ids: Int[Array, "B T"]
) -> Float[Array, "B T-1"]:
    """Return -log p of each next token, in nats."""

    def loss(row: tuple[Array, Array]) -> Array:
        logits = rms_norm(row[0], head.norm, eps) @ head.table.T
        return jax.nn.logsumexp(logits) - logits[row[1]]

    flat = x[:, :-1].reshape(-1, x.shape[-1])
    losses = jax.lax.map(loss, (flat, ids[:, 1:].reshape(-1)), batch_size=ROWS)
    return losses.reshape(ids.shape[0], -1)


@partial(jax.jit, static_argnums=0)
def loss_gradient(
    eps: float, head: Head, x: Float[Array, "B T D"], ids: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Return the gradient of the summed losses by the residual stream after the last layer."""

    def gradient(row: tuple[Array, Array]) -> Array:
        def logits_of(x: Array) -> Array:
            return rms_norm(x, head.norm, eps) @ head.table.T

        logits, pull = jax.vjp(logits_of, row[0])
        return pull(jax.nn.softmax(logits).at[row[1]].add(-1.0))[0]

    flat = x[:, :-1].reshape(-1, x.shape[-1])
    grads = jax.lax.map(gradient, (flat, ids[:, 1:].reshape(-1)), batch_size=ROWS)
    return jnp.pad(grads.reshape(x.shape[0], -1, x.shape[-1]), ((0, 0), (0, 1), (0, 0)))


def embed(model: LayeredModel, ids: Int[np.ndarray, "B T"]) -> Float[Array, "B T D"]:
    """Return the residual stream before the first layer."""
    return model.embed[jnp.asarray(ids)]
