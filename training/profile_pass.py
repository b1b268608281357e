"""One layer of a profile: what the model does, and sums of what is asked of it, in one compiled function."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from training.forward import attend, ffn_output, ffn_values

DISTANCES = 64  # of reactivation, in tokens


class LayerSums(NamedTuple):
    """One batch of one layer.

    Attributes:
        packed: active neurons of each token, packed to bits, uint8 [B, T, ceil(F / 8)].
        active: active neurons of each token, int32 [B, T].
        neurons: tokens at which each neuron was active, for each window, int32 [B, F].
        cosine: mean over the window's tokens of the cosine to the streams one and two layers earlier [B, 2].
        again: neurons active both at t and at t + d, summed over t, d = 1.. [B, distances].
    """

    packed: UInt8[Array, "B T bytes"]
    active: Int[Array, "B T"]
    neurons: Int[Array, "B F"]
    cosine: Float[Array, "B 2"]
    again: Float[Array, "B distances"]


@partial(jax.jit, static_argnums=0)
def profile_layer(
    graph: Any,
    state: Any,
    x: Float[Array, "B T D"],
    threshold: Float[Array, ""],
    earlier: tuple[Float[Array, "B T D"], Float[Array, "B T D"]],
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], LayerSums]:
    """Run a layer under its threshold.

    Args:
        graph, state: of the layer.
        x: residual stream before it.
        threshold: of the layer.
        earlier: streams after attention one and two layers earlier.

    Returns:
        The stream after the layer, the stream after its attention, and the sums.
    """
    block = nnx.merge(graph, state)
    after, h = attend(block, x)
    z, active, _ = ffn_values(block, h, threshold)
    cosine = jnp.stack([_cosine(after, other).mean(-1) for other in earlier], axis=-1)
    sums = LayerSums(
        jnp.packbits(active, axis=-1),
        active.sum(-1),
        active.sum(1),
        cosine,
        jax.lax.map(_again, active),
    )
    return after + ffn_output(block, z), after, sums


def _cosine(a: Array, b: Array) -> Float[Array, "B T"]:
    return (a * b).sum(-1) / (jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1))


def _again(active: Array) -> Float[Array, " distances"]:
    """Sum the diagonals of the tokens' overlap matrix: [T, F] -> [distances]."""
    values = active.astype(jnp.float32)
    overlap = values @ values.T  # [T, T], whole numbers under 2^24
    length = overlap.shape[0]
    rows = jnp.arange(length)[None, :]
    columns = rows + 1 + jnp.arange(DISTANCES)[:, None]
    inside = overlap[rows, jnp.minimum(columns, length - 1)]
    return jnp.where(columns < length, inside, 0).sum(-1)
