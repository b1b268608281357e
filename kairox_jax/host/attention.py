"""The dense part of a decode step on the host: norm, attention with its cache, and the FFN's input.

For machines without an accelerator: XLA's CPU backend spends most of a single-token attention block on waking
threads, these kernels read packed weights in one pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numba import prange

from kairox_jax.config import ModelConfig
from kairox_jax.host import rows, threads
from kairox_jax.host.compile import kernel
from kairox_jax.quant import PackedRows

ROWS_PER_CHUNK = 48


@kernel()
def _rms_norm(x, scale, eps, out):
    for b in range(x.shape[0]):
        total = np.float32(0)
        for d in range(x.shape[1]):
            total += x[b, d] * x[b, d]
        factor = np.float32(1) / np.float32(math.sqrt(total / x.shape[1] + eps))
        for d in range(x.shape[1]):
            out[b, d] = x[b, d] * factor * scale[d]


@kernel()
def _rotate(vector, cos, sin):
    """Turn the pairs (h, h + H/2) of one head in place."""
    half = cos.shape[0]
    for h in range(half):
        first, second = vector[h], vector[h + half]
        vector[h] = first * cos[h] - second * sin[h]
        vector[h + half] = second * cos[h] + first * sin[h]


@kernel()
def _attend(query, keys, values, scores, out):
    """Mix the values of one head: query [H], keys and values [S, H], scores [S] is scratch."""
    length, size = keys.shape
    scale = np.float32(1) / np.float32(math.sqrt(size))
    best = np.float32(-np.inf)
    for s in range(length):
        total = np.float32(0)
        for h in range(size):
            total += query[h] * keys[s, h]
        scores[s] = total * scale
        best = max(best, scores[s])
    norm = np.float32(0)
    for s in range(length):
        scores[s] = np.float32(math.exp(scores[s] - best))
        norm += scores[s]
    out[:] = 0
    for s in range(length):
        weight = scores[s] / norm
        for h in range(size):
            out[h] += weight * values[s, h]


@kernel(parallel=True)
def _product(x, matrix, mark, out):
    """Write x [B, num] times the rows of a packed matrix to out [B, rows]."""
    num_rows = matrix.shape[0]
    for c in prange((num_rows + ROWS_PER_CHUNK - 1) // ROWS_PER_CHUNK):
        for r in range(c * ROWS_PER_CHUNK, min((c + 1) * ROWS_PER_CHUNK, num_rows)):
            row = matrix.ctypes.data + r * matrix.shape[1]
            for b in range(x.shape[0]):
                x_row = x.ctypes.data + 4 * b * x.shape[1]
                out[b, r] = rows.dot(mark, row, x_row, x.shape[1], row + matrix.shape[1])


@kernel(parallel=True)
def _attend_all(qkv, keys, values, positions, scores, mixed):
    batch, kv_heads, _, size = keys.shape
    heads = mixed.shape[1] // size
    group = heads // kv_heads
    for task in prange(batch * heads):
        b, head = task // heads, task % heads
        seen = positions[b] + 1
        _attend(
            qkv[b, head * size : (head + 1) * size],
            keys[b, head // group, :seen],
            values[b, head // group, :seen],
            scores[task, :seen],
            mixed[b, head * size : (head + 1) * size],
        )


@kernel()
def _front(
    x, norm, ffn_norm, eps, wqkv, wqkv_mark, wo, wo_mark, cos, sin, keys, values, positions,
    h, qkv, mixed, scores,
):  # fmt: skip
    batch, kv_heads, _, size = keys.shape
    heads = mixed.shape[1] // size
    _rms_norm(x, norm, eps, h)
    _product(h, wqkv, wqkv_mark, qkv)
    for b in range(batch):
        for head in range(heads + kv_heads):
            _rotate(qkv[b, head * size : (head + 1) * size], cos[b], sin[b])
        for head in range(kv_heads):
            first = (heads + head) * size
            keys[b, head, positions[b]] = qkv[b, first : first + size]
            first += kv_heads * size
            values[b, head, positions[b]] = qkv[b, first : first + size]
    _attend_all(qkv, keys, values, positions, scores, mixed)
    _product(mixed, wo, wo_mark, h)
    for b in range(batch):
        for d in range(x.shape[1]):
            x[b, d] += h[b, d]
    _rms_norm(x, ffn_norm, eps, h)


@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    """One layer's attention, as the host kernels read it.

    Attributes:
        norm, ffn_norm: float32 [D], scales in front of attention and FFN.
        wqkv: packed rows of query, key and value heads, [(N + 2K) H, D].
        wo: packed rows [D, N H].
    """

    norm: Float[np.ndarray, " D"]
    ffn_norm: Float[np.ndarray, " D"]
    wqkv: PackedRows
    wo: PackedRows


class HostAttention:
    """Runs attention blocks of single tokens, with scratch that is shared by all layers.

    Args:
        config: sizes of the model.
        batch: B, sequences in a step.
        length: S, positions of a cache.
    """

    def __init__(self, config: ModelConfig, *, batch: int, length: int) -> None:
        self.config, self.batch = config, batch
        heads = config.num_heads + 2 * config.num_kv_heads
        self._qkv = np.empty((batch, heads * config.head_dim), np.float32)
        self._mixed = np.empty((batch, config.num_heads * config.head_dim), np.float32)
        self._scores = np.empty((batch * config.num_heads, length), np.float32)
        self._h = np.empty((batch, config.d_model), np.float32)

    def front(
        self,
        weights: AttentionWeights,
        x: Float[np.ndarray, "B D"],
        keys: Float[np.ndarray, "B K S H"],
        values: Float[np.ndarray, "B K S H"],
        positions: Int[np.ndarray, " B"],
        cos: Float[np.ndarray, "B half"],
        sin: Float[np.ndarray, "B half"],
    ) -> Float[np.ndarray, "B D"]:
        """Attend at one new position of each sequence.

        Args:
            weights: of the layer.
            x: residual stream, updated in place.
            keys, values: the layer's cache, updated in place.
            positions: of the new tokens, int32 [B], inside the cache.
            cos, sin: of the rotary angles at these positions.

        Returns:
            The FFN's normalised input [B, D]; overwritten by the next call.
        """
        with threads.own():
            _front(
                x, weights.norm, weights.ffn_norm, np.float32(self.config.norm_eps),
                weights.wqkv.data, rows.MARKS[weights.wqkv.format], weights.wo.data, rows.MARKS[weights.wo.format],
                cos, sin, keys, values, positions, self._h, self._qkv, self._mixed, self._scores,
            )  # fmt: skip
        return self._h


def host_norm(
    x: Float[np.ndarray, "B D"], scale: Float[np.ndarray, " D"], eps: float
) -> Float[np.ndarray, "B D"]:
    """Divide by the root mean square over D and scale; float32 [B, D]."""
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(eps)) * scale
