"""Grouped-query attention with its norm, positions, window and key/value cache."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kairox_jax.config import ModelConfig
from kairox_jax.models.norm import normalise

MASKED = -1e30  # finite, so that a row without any key gives a mean and no NaN


class KVCache(NamedTuple):
    """Keys and values of one layer, [B, K, S, H] each; position s of a sequence is at index s."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S H"]


def empty_cache(config: ModelConfig, *, batch: int, length: int) -> KVCache:
    """Return a zeroed cache of ``length`` positions for ``batch`` sequences."""
    shape = (batch, config.num_kv_heads, length, config.head_dim)
    return KVCache(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))


def rotary_frequencies(config: ModelConfig) -> Float[np.ndarray, " half"]:
    """Return the angle per position of each rotary pair, stretched where asked: float32 [H/2], radians."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    inv_freq = config.rope_theta**-exponent
    scaling = config.rope_scaling
    return (inv_freq if scaling is None else scaling.scale(inv_freq)).astype(np.float32)


def rotate(
    x: Float[Array, "B T heads H"], positions: Int[Array, "B T"], frequencies: Float[np.ndarray, " half"]
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
    """Pre-norm attention: ``y = wo attend(norm(x)) + bo``; the caller adds the residual.

    Attributes:
        norm: [D] scale of the norm.
        norm_bias: [D], or None for an RMS norm.
        wqkv: [(N + 2K) H, D], rows of query, key and value heads.
        bqkv: [(N + 2K) H], or None.
        wo: [D, N H].
        bo: [D], or None.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        dim = config.d_model
        init = nnx.initializers.normal(0.02)
        self.norm = nnx.Param(jnp.ones((dim,), jnp.float32))
        self.norm_bias = nnx.Param(jnp.zeros((dim,), jnp.float32)) if config.norm == "layernorm" else None
        self.wqkv = nnx.Param(init(rngs.params(), (rows, dim)))
        self.bqkv = nnx.Param(jnp.zeros((rows,), jnp.float32)) if config.qkv_bias else None
        self.wo = nnx.Param(init(rngs.params(), (dim, config.num_heads * config.head_dim)))
        self.bo = nnx.Param(jnp.zeros((dim,), jnp.float32)) if config.out_bias else None

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
            start: position of the first new token of each sequence, int32 [B]; all 0 without a cache.
            cache: keys and values of earlier positions; None when there are none.
            attend: read only the first ``attend`` cached positions (static; at least ``start + T``).

        Returns:
            The block's output [B, T, D] and the cache with the new positions.
        """
        bias = None if self.norm_bias is None else self.norm_bias[...]
        qkv = normalise(x, self.norm[...], bias, self.config.norm_eps) @ self.wqkv[...].T
        if self.bqkv is not None:
            qkv = qkv + self.bqkv[...][None, None, :]
        mixed, cache = mix_heads(self.config, qkv, start, cache, attend)
        y = mixed @ self.wo[...].T
        return y if self.bo is None else y + self.bo[...][None, None, :], cache


def mix_heads(
    config: ModelConfig,
    qkv: Float[Array, "B T rows"],
    start: Int[Array, " B"],
    cache: KVCache | None,
    attend: int | None,
) -> tuple[Float[Array, "B T width"], KVCache]:
    """Do what an attention block does between its two matrices.

    Args:
        config: of the model.
        qkv: query, key and value heads of T new positions [B, T, (N + 2K) H], not yet turned by their positions.
        start, cache, attend: as for ``Attention``.

    Returns:
        The heads' mixed values [B, T, N H] and the cache with the new positions.
    """
    batch, steps, _ = qkv.shape
    n, k, h = config.num_heads, config.num_kv_heads, config.head_dim
    positions = start[:, None] + jnp.arange(steps)[None, :]
    q, key, value = jnp.split(qkv.reshape(batch, steps, n + 2 * k, h), [n, n + k], axis=2)
    if config.positions == "rotary":
        frequencies = rotary_frequencies(config)
        q, key = rotate(q, positions, frequencies), rotate(key, positions, frequencies)
    new = KVCache(key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3))
    cache = new if cache is None else write_cache(cache, new, start)
    seen = cache if attend is None else KVCache(cache.k[:, :, :attend], cache.v[:, :, :attend])
    mixed = _mix(q.reshape(batch, steps, k, n // k, h), seen, _allowed(config, positions, seen.k.shape[2]))
    return mixed.reshape(batch, steps, n * h), cache


def _mix(
    q: Float[Array, "B T K G H"], seen: KVCache, allowed: Bool[Array, "B T S"]
) -> Float[Array, "B T K G H"]:
    """Return the mixed values of each query.

    The query heads of a key head stand under each other in one matrix product: as an einsum over five axes it
    took XLA's CPU backend twice as long.
    """
    batch, steps, k, group, h = q.shape
    rows = q.transpose(0, 2, 3, 1, 4).reshape(batch, k, group * steps, h)
    scores = jnp.einsum("bkrh,bksh->bkrs", rows, seen.k).reshape(batch, k, group, steps, -1) * h**-0.5
    scores = jnp.where(allowed[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).reshape(batch, k, group * steps, -1)
    mixed = jnp.einsum("bkrs,bksh->bkrh", weights, seen.v)
    return mixed.reshape(batch, k, group, steps, h).transpose(0, 3, 1, 2, 4)


def _allowed(config: ModelConfig, positions: Int[Array, "B T"], seen: int) -> Bool[Array, "B T S"]:
    """Say which of the first ``seen`` positions each query sees: up to its own, within the window."""
    key_at, query_at = jnp.arange(seen)[None, None, :], positions[:, :, None]
    allowed = key_at <= query_at
    window = config.sliding_window
    # A window that no cached position can leave costs nothing.
    return allowed if window is None or window >= seen else allowed & (key_at > query_at - window)
