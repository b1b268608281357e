"""Normalisation over the residual stream: RMS norm, and layer norm where a family has a bias."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Vector = TypeVar("Vector", Float[Array, " D"], Float[np.ndarray, " D"])


class Norm(NamedTuple, Generic[Vector]):
    """A checkpoint's norm: a scale [D], and the bias [D] of a layer norm (None: an RMS norm)."""

    scale: Vector
    bias: Vector | None


def rms_norm(x: Float[Array, "*batch D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*batch D"]:
    """Divide by the root mean square over D and scale."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * _aligned(scale, x)


def layer_norm(
    x: Float[Array, "*batch D"], scale: Float[Array, " D"], bias: Float[Array, " D"], eps: float
) -> Float[Array, "*batch D"]:
    """Subtract the mean over D, divide by the root of the biased variance, scale and shift."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return rms_norm(centred, scale, eps) + _aligned(bias, x)


def normalise(
    x: Float[Array, "*batch D"], scale: Float[Array, " D"], bias: Float[Array, " D"] | None, eps: float
) -> Float[Array, "*batch D"]:
    """Apply a checkpoint's norm: ``layer_norm`` where it has a bias, else ``rms_norm`` (chosen in Python)."""
    return rms_norm(x, scale, eps) if bias is None else layer_norm(x, scale, bias, eps)


def _aligned(weight: Float[Array, " D"], x: Float[Array, "*batch D"]) -> Array:
    """Give a weight the rank of ``x``: rank promotion is an error here."""
    return weight.reshape((1,) * (x.ndim - 1) + weight.shape)
