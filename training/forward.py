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
from jaxtyping import Array, Bool, Float, Int

from kairox_jax.config import ModelConfig
from kairox_jax.models import Block, Decoder, neuron_values, normalise
from training.statistics import BINS, BINS_PER_OCTAVE, LEAST_OCTAVE

KEEP_ALL = -1.0  # a threshold that every |z| exceeds: the dense function
ROWS = 256  # positions whose logits are held at a time


class Head(NamedTuple):
    """Final norm's scale [D], output matrix [V, D], and the norm's bias [D] where it has one."""

    norm: Float[Array, " D"]
    table: Float[Array, "V D"]
    bias: Float[Array, " D"] | None = None


@dataclass(frozen=True)
class LayeredModel:
    """A dense decoder, split into functions and one tuple of weights a layer."""

    config: ModelConfig
    graph: Any
    layers: tuple[Any, ...]
    embed: Float[Array, "V D"]
    head: Head
    pos_embed: Float[Array, "P D"] | None = None

    @property
    def dense_threshold(self) -> float:
        """The threshold under which a layer is the dense function."""
        return KEEP_ALL if self.config.activation == "silu" else self.config.activation_threshold


def layered(decoder: Decoder) -> LayeredModel:
    """Split a dense decoder for layer-by-layer use."""
    parts = [nnx.split(block) for block in decoder.blocks]
    table = decoder.embed if decoder.output is None else decoder.output
    bias = None if decoder.out_norm_bias is None else decoder.out_norm_bias[...]
    head = Head(decoder.out_norm[...], table[...], bias)
    layers = tuple(state for _, state in parts)
    positions = None if decoder.pos_embed is None else decoder.pos_embed[...]
    return LayeredModel(decoder.config, parts[0][0], layers, decoder.embed[...], head, positions)


def attend(block: Block, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """Return the residual stream after attention, and what the FFN reads (the same unless parallel)."""
    after = x + block.attention(x, jnp.zeros(x.shape[:1], jnp.int32))[0]
    return after, x if block.parallel else after


def ffn_values(
    block: Block, x: Float[Array, "B T D"], threshold: Float[Array, ""]
) -> tuple[Float[Array, "B T F"], Bool[Array, "B T F"], Float[Array, "B T F"]]:
    """Return each neuron's value, whether it is active, and what its threshold is compared with."""
    ffn = block.ffn
    h = ffn.normalise(x)
    gate = None if ffn.w_gate is None else h @ ffn.w_gate[...].T
    up = h @ ffn.w_up[...].T
    if ffn.b_up is not None:
        up = up + ffn.b_up[...][None, None, :]
    z, active = neuron_values(gate, up, ffn.config.activation, threshold)
    driver = up if gate is None else gate
    return z, active, jnp.abs(z) if ffn.config.activation == "silu" else jnp.where(active, driver, 0)


def ffn_output(block: Block, z: Float[Array, "B T F"]) -> Float[Array, "B T D"]:
    """Return the FFN's output for its neurons' values."""
    y = z @ block.ffn.w_down[...]
    return y if block.ffn.b_down is None else y + block.ffn.b_down[...][None, None, :]


@partial(jax.jit, static_argnums=0)
def run_layer(
    graph: Any, state: Any, x: Float[Array, "B T D"], threshold: Float[Array, ""]
) -> tuple[Float[Array, "B T D"], Int[Array, " F"]]:
    """Return the residual stream after a layer and how many tokens each neuron was active for."""
    block = nnx.merge(graph, state)
    after, h = attend(block, x)
    z, active, _ = ffn_values(block, h, threshold)
    return after + ffn_output(block, z), active.sum((0, 1))


@partial(jax.jit, static_argnums=0)
def histogram_layer(
    graph: Any, state: Any, x: Float[Array, "B T D"], threshold: Float[Array, ""]
) -> tuple[Float[Array, "B T D"], Int[Array, " bins"]]:
    """Return the residual stream after a dense layer and the histogram of log2 of what thresholds cut.

    That is |silu(gate) up| for SiLU and the gate for FATReLU; what is exactly zero is left out, so that shares
    are those of the neurons that count at all.

    Args:
        graph, state: of the layer.
        x: residual stream before it.
        threshold: under which the layer is dense, ``LayeredModel.dense_threshold``.
    """
    block = nnx.merge(graph, state)
    after, h = attend(block, x)
    z, _, size = ffn_values(block, h, threshold)
    octave = jnp.log2(jnp.maximum(size, 1e-30))
    place = jnp.clip(jnp.floor((octave - LEAST_OCTAVE) * BINS_PER_OCTAVE), 0, BINS - 1).astype(jnp.int32)
    counts = jnp.bincount(place.reshape(-1), weights=(size > 0).reshape(-1).astype(jnp.int32), length=BINS)
    return after + ffn_output(block, z), counts


@partial(jax.jit, static_argnums=0)
def sensitivity_layer(
    graph: Any,
    state: Any,
    x: Float[Array, "B T D"],
    grad: Float[Array, "B T D"],
    edges: Float[Array, " J"],
    threshold: Float[Array, ""],
) -> tuple[Float[Array, "B T D"], Float[Array, " J"]]:
    """Pull a gradient back through a dense layer, and estimate what thresholds at ``edges`` would cost there.

    Dropping the neurons whose size (see ``histogram_layer``) is at most an edge changes the layer's output by
    d; with the gradient g of the token's loss, the divergence from the dense model is 1/2 E[(g . d)^2] to
    second order (Fisher information, with the labels of the text instead of labels drawn from the model).

    Returns:
        The gradient at the layer's input, and the sum over tokens of 1/2 (g . d)^2 for each edge.
    """
    block = nnx.merge(graph, state)

    def whole(x: Array) -> tuple[Array, tuple[Array, Array]]:
        after, h = attend(block, x)
        z, _, size = ffn_values(block, h, threshold)
        return after + ffn_output(block, z), (z, size)

    _, pull, (z, size) = jax.vjp(whole, x, has_aux=True)
    share = z * (grad @ block.ffn.w_down[...].T)  # [B, T, F], g . (neuron's part of the output)

    def cost(edge: Array) -> Array:
        return 0.5 * jnp.square(jnp.where(size <= edge, share, 0).sum(-1)).sum()

    return pull(grad)[0], jax.lax.map(cost, edges)


@partial(jax.jit, static_argnums=0)
def token_losses(
    eps: float, head: Head, x: Float[Array, "B T D"], ids: Int[Array, "B T"]
) -> Float[Array, "B T-1"]:
    """Return -log p of each next token, in nats."""

    def loss(row: tuple[Array, Array]) -> Array:
        logits = normalise(row[0], head.norm, head.bias, eps) @ head.table.T
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
            return normalise(x, head.norm, head.bias, eps) @ head.table.T

        logits, pull = jax.vjp(logits_of, row[0])
        return pull(jax.nn.softmax(logits).at[row[1]].add(-1.0))[0]

    flat = x[:, :-1].reshape(-1, x.shape[-1])
    grads = jax.lax.map(gradient, (flat, ids[:, 1:].reshape(-1)), batch_size=ROWS)
    return jnp.pad(grads.reshape(x.shape[0], -1, x.shape[-1]), ((0, 0), (0, 1), (0, 0)))


def embed(model: LayeredModel, ids: Int[np.ndarray, "B T"]) -> Float[Array, "B T D"]:
    """Return the residual stream before the first layer."""
    x = model.embed[jnp.asarray(ids)]
    return x if model.pos_embed is None else x + model.pos_embed[None, : ids.shape[1]]
