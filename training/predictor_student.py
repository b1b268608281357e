"""A layer with its predictor as a differentiable function: what end-to-end training runs layer by layer.

Forward is what the engine computes: hard gates and rounded weights. Backward, a gate is a sigmoid of its score and
rounding is the identity (straight-through). Ranks are padded to one, so that one compiled function serves all layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kairox_jax.models import normalise
from training.forward import ROWS, Head
from training.predictor_data import rms_normalised
from training.predictor_fit import Fitted
from training.products import with_products

SOFTNESS = 0.5  # of a gate's sigmoid, in units of the score: logarithms of contributions


class Weights(NamedTuple):
    """What is trained of a layer; hidden units beyond its rank stay zero."""

    fc1: Float[Array, "R D"]
    fc1_bias: Float[Array, " R"]
    fc2: Float[Array, "F R"]
    bias: Float[Array, " F"]
    rest: Float[Array, "D R"]
    rest_bias: Float[Array, " D"]


class Scales(NamedTuple):
    """What is not trained of a layer: units in which its weights are of like size, and which hidden units it has."""

    mean: Float[Array, " D"]
    scale: Float[Array, " D"]
    hidden: Float[Array, " R"]
    output: Float[Array, ""]
    units: Float[Array, " R"]


def straight_through(exact: Array, smooth: Array) -> Array:
    """Return ``exact`` with the gradient of ``smooth``."""
    return smooth + jax.lax.stop_gradient(exact - smooth)


def rounded(rows: Float[Array, "rows n"]) -> Float[Array, "rows n"]:
    """Return rows as ``io.predictor_file.pack_rows`` rounds them to Q4_0; the gradient passes through.

    Where n is no multiple of 32 they are rounded to float16, as they are stored then.
    """
    if rows.shape[1] % 32:
        return straight_through(rows.astype(jnp.float16).astype(jnp.float32), rows)
    blocks = rows.reshape(rows.shape[0], -1, 32)
    at = jnp.abs(blocks).argmax(-1, keepdims=True)
    scale = (jnp.take_along_axis(blocks, at, -1) / -8).astype(jnp.float16).astype(jnp.float32)
    level = jnp.clip(jnp.rint(blocks / jnp.where(scale == 0, 1, scale)) + 8, 0, 15) - 8
    return straight_through((level * scale).reshape(rows.shape), rows)


def begin(fitted: Fitted, scale: np.ndarray, cut: float, rank: int, output: float) -> tuple[Weights, Scales]:
    """Return where a layer begins: its trained predictor with the threshold 0, and its estimate of the rest if any.

    Args:
        fitted: the trained predictor.
        scale: standard deviation of its input, [D].
        cut: its threshold.
        rank: of all layers; what the predictor has less is padded.
        output: size of the layer's output, the unit of the estimate.
    """
    own, dim = fitted.fc1.shape

    def units(a: np.ndarray) -> np.ndarray:
        return np.pad(a, [(0, rank - own)] + [(0, 0)] * (a.ndim - 1))

    def array(a: Any) -> Array:
        return jnp.asarray(a, jnp.float32)

    hidden = units(fitted.fc1_bias + fitted.fc1 @ fitted.mean)
    hidden_mean = np.maximum(hidden, 0)  # about: the input's mean is taken out of it
    rest = np.zeros((dim, own)) if fitted.rest is None else fitted.rest / output
    rest_bias = np.zeros(dim) if fitted.rest_bias is None else fitted.rest_bias / output
    weights = Weights(
        fc1=array(units(fitted.fc1 * scale[None])),
        fc1_bias=array(hidden),
        fc2=array(units(fitted.fc2.T).T),
        bias=array(fitted.bias - cut + fitted.fc2 @ hidden_mean[:own]),
        rest=array(units(rest.T).T),
        rest_bias=array(rest_bias + rest @ hidden_mean[:own]),
    )
    fixed = Scales(
        mean=array(fitted.mean),
        scale=array(scale),
        hidden=array(hidden_mean),
        output=jnp.float32(output),
        units=array(units(np.ones(own))),
    )
    return weights, fixed


def stored(w: Weights, s: Scales, *, rounding: bool) -> Weights:
    """Return a layer's weights in the units of the file, rounded as the file rounds them or not.

    The weights that are trained read hidden units without their mean, which is twice their deviation: with it, a step
    of the second matrix would move all scores of a layer at once.
    """
    keep = rounded if rounding else lambda rows: rows
    fc1 = keep(w.fc1 / s.scale[None] * s.units[:, None])
    fc2, rest = keep(w.fc2 * s.units[None]), keep(w.rest * s.output * s.units[None])
    return Weights(
        fc1=fc1,
        fc1_bias=w.fc1_bias * s.units - fc1 @ s.mean,  # what rounding does to the mean input is taken back
        fc2=fc2,
        bias=w.bias - fc2 @ s.hidden,
        rest=rest,
        rest_bias=w.rest_bias * s.output - rest @ s.hidden,
    )


def student_layer(
    graph: Any,
    state: Any,
    w: Weights,
    s: Scales,
    x: Float[Array, "B T D"],
    before: Float[Array, "B T D"] | None,
    *,
    rounding: bool,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], Float[Array, " B"]]:
    """Run a layer with its predictor.

    Args:
        graph, state: of the dense block.
        w, s: of the predictor.
        x: the residual stream before the layer.
        before: the stream after the attention of the layer before, which its predictor reads; None where it reads
            that of the layer itself.
        rounding: whether weights are rounded as the file rounds them.

    Returns:
        The stream after the layer, the one after its attention, and the share of neurons each window touches.
    """
    block = nnx.merge(graph, state)
    after = x + block.attention(x, jnp.zeros(x.shape[:1], jnp.int32))[0]
    own = stored(w, s, rounding=rounding)
    given = rms_normalised(after if before is None else before)
    hidden = jax.nn.relu(given @ own.fc1.T + own.fc1_bias[None, None])
    score = hidden @ own.fc2.T + own.bias[None, None]
    gate = straight_through((score >= 0).astype(jnp.float32), jax.nn.sigmoid(score / SOFTNESS))
    z, _ = block.ffn.values(block.ffn.normalise(x if block.parallel else after))
    y = (gate * z) @ block.ffn.w_down[...] + hidden @ own.rest.T + own.rest_bias[None, None]
    if block.ffn.b_down is not None:
        y = y + block.ffn.b_down[...][None, None]
    return after + y, after, gate.mean((1, 2))


def divergence(
    eps: float, head: Head, y: Float[Array, "n D"], x: Float[Array, "n D"], *, products: str
) -> Float[Array, " n"]:
    """Return the KL divergence of next-token distributions from the dense model's, nats.

    Args:
        eps: of the last norm.
        head: the last norm and the output matrix.
        y: what the dense model's output matrix reads.
        x: the last residual stream, before the norm.
        products: see ``products.with_products``.
    """

    def rows(table: Array, pair: Array) -> Array:
        dense, logits = (jax.nn.log_softmax(part @ table.T) for part in pair)
        return (jnp.exp(dense) * (dense - logits)).sum(-1)

    part = with_products(rows, products)
    pair = jnp.stack([y, normalise(x, head.norm, head.bias, eps)])
    found = [part(head.table, pair[:, at : at + ROWS]) for at in range(0, pair.shape[1], ROWS)]
    return jnp.concatenate(found)
