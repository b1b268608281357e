"""Grouped-query attention with rotary positions, its key/value cache, and the norm in front of it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kairox_jax.config import ModelConfig

MASKED = -1e30  # finite, so that a row without any key gives a mean and no NaN


class KVCache(NamedTuple):
    """Keys and values of one layer, [B, K, S, H] each; position s of a sequence is at index s."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]


def empty_cache(config: ModelConfig, *, batch: int, length: int) -> KVCache:
    """Return a zeroed cache of ``length`` positions for ``batch`` sequences."""
    shape = (batch, config.num_kv_heads, length, config.head_dim)
    return KVCache(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))


def rotary_frequencies(config: ModelConfig) -> Float[np.ndarray, H / 2]:
    """Return the angle per position of each rotary pair, float32 [H/2], in radians."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    return (config.rope_theta**-exponent).astype(np.float32)


def rotate(
    x: Float[Array, "B T heads H"], positions: Int[Array, "B T"], frequencies: Float[np.ndarray, H / 2]
) -> Float[Array, "B T heads H"]:
    """Turn pairs (h, h + H/2) by position times frequency (the half-split order of Hugging Face files)."""
    angle = positions[:, :, None, None].astype(jnp.float32) * jnp.asarray(frequencies)[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def write_cache(cache: KVCache, new: KVCache, start: Int[Array, " B"]) -> KVCache:
    """Put T new keys and values [B, K, T, H] at positions ``start`` .. ``start + T - 1`` of each sequence.

    Positions past the cache's end are dropped (padding of a prompt's last chunk).
    """
    batch, _, steps, _ = new.k.shape
    if steps == 1:
        for b in range(batch):  # a slice update is in place under donation; a scatter is far slower on CPU
            at = (b, 0, start[b], 0)
            cache = KVCache(
                jax.lax.dynamic_update_slice(cache.k, new.k[b : b + 1], at),
                jax.lax.dynamic_update_slice(cache.v, new.v[b : b + 1], at),
            )
        return cache
    rows = jnp.arange(batch)[:, None]
    index = start[:, None] + jnp.arange(steps)[None, :]

    def put(old: Array, values: Array) -> Array:
        return old.at[rows, :, index].set(values.transpose(0, 2, 1, 3), mode="drop", unique_indices=True)

    return KVCache(put(cache.k, new.k), put(cache.v, new.v))


class Attention(nnx.Module):
    """Pre-norm attention: ``y = wo attend(norm(x))``; the caller adds the residual.

    Attributes:
        norm: [D] RMS norm's scale.
        wqkv: [(N + 2K) H, D], rows of query, key and value heads.
        wo: [D, N H].
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        heads = config.num_heads + 2 * config.num_kv_heads
        init = nnx.initializers.normal(0.02)
        self.norm = nnx.Param(jnp.ones((config.d_model,), jnp.float32))
        self.wqkv = nnx.Param(init(rngs.params(), (heads * config.head_dim, config.d_model)))
        self.wo = nnx.Param(init(rngs.params(), (config.d_model, config.num_heads * config.head_dim)))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        start: Int[Array, " B"],
        cache: KVCache | None = None,
        *,
        attend: int | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Attend from T new positions to themselves and to the cache.

        Args:
            x: residual stream [B, T, D].
            start: position of the first new token of each sequence, int32 [B].
            cache: keys and values of earlier positions; None when there are none.
            attend: read only the first ``attend`` cached positions (static; at least ``start + T``).

        Returns:
            The block's output [B, T, D] and the cache with the new positions.
        """
        config = self.config
        batch, steps, _ = x.shape
        n, k, h = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = rms_norm(x, self.norm[...], config.norm_eps) @ self.wqkv[...].T
        q, key, value = jnp.split(qkv.reshape(batch, steps, n + 2 * k, h), [n, n + k], axis=2)
        positions = start[:, None] + jnp.arange(steps)[None, :]
        frequencies = rotary_frequencies(config)
        q, key = rotate(q, positions, frequencies), rotate(key, positions, frequencies)
        new = KVCache(key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3))
        cache = new if cache is None else write_cache(cache, new, start)
        seen_k, seen_v = (c if attend is None else c[:, :, :attend] for c in cache)
        q = q.reshape(batch, steps, k, n // k, h)
        scores = jnp.einsum("btkgh,bksh->bkgts", q, seen_k) * h**-0.5
        key_at = jnp.arange(seen_k.shape[2])
        allowed = key_at[None, None, :] <= positions[:, :, None]  # [B, T, S]
        scores = jnp.where(allowed[:, None, None], scores, MASKED)
        mixed = jnp.einsum("bkgts,bksh->btkgh", jax.nn.softmax(scores, axis=-1), seen_v)
        return mixed.reshape(batch, steps, n * h) @ self.wo[...].T, cache


def rms_norm(x: Float[Array, "*batch D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*batch D"]:
    """Divide by the root mean square over D and scale."""
    weight = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * weight
