"""The dense part of a decode step on the host: norm, attention with its cache, and the FFN's input.

For machines without an accelerator: XLA's CPU backend spends most of a single-token attention block on waking
threads, these kernels read packed weights in one pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int
from numba import prange

from kairox_jax.config import ModelConfig
from kairox_jax.host import rows, threads
from kairox_jax.host.compile import kernel
from kairox_jax.host.crew import STAGE_BYTES, clear, finish, take, wait
from kairox_jax.host.heads import attend
from kairox_jax.host.loops import prepare, product_share
from kairox_jax.quant import PackedRows

ROWS_PER_CHUNK = 48
STAGES = 5  # of a block: product, cache, heads, their rounding, product


@kernel(inner=True)
def _norm(x, scale, bias, eps, out):
    """Write the RMS norm of each row, or its layer norm where there is a bias."""
    size = x.shape[1]
    for b in range(x.shape[0]):
        mean = np.float32(0)
        if bias.shape[0] > 0:
            for d in range(size):
                mean += x[b, d]
            mean /= np.float32(size)
        total = np.float32(0)
        for d in range(size):
            total += (x[b, d] - mean) * (x[b, d] - mean)
        factor = np.float32(1) / np.float32(math.sqrt(total / size + eps))
        for d in range(size):
            out[b, d] = (x[b, d] - mean) * factor * scale[d]
    _add(bias, out)


@kernel(inner=True)
def _add(bias, out):
    """Add a bias to each row; an empty one does nothing."""
    for b in range(out.shape[0]):
        for d in range(bias.shape[0]):
            out[b, d] += bias[d]


@kernel(inner=True)
def _rotate(vector, cos, sin):
    """Turn the pairs (h, h + H/2) of one head in place."""
    half = cos.shape[0]
    for h in range(half):
        first, second = vector[h], vector[h + half]
        vector[h] = first * cos[h] - second * sin[h]
        vector[h + half] = second * cos[h] + first * sin[h]


@kernel(inner=True)
def _place(qkv, bqkv, cos, sin, keys, values, cache_row, position, heads):
    """Add one token's bias, turn its queries and keys, and put keys and values into the cache."""
    kv_heads, size = keys.shape[1], keys.shape[3]
    for d in range(bqkv.shape[0]):
        qkv[d] += bqkv[d]
    for head in range(heads + kv_heads):
        _rotate(qkv[head * size : (head + 1) * size], cos, sin)
    for head in range(kv_heads):
        first = (heads + head) * size
        keys[cache_row, head, position] = qkv[first : first + size]
        first += kv_heads * size
        values[cache_row, head, position] = qkv[first : first + size]


@kernel(inner=True)
def _attend_task(task, span, qkv, keys, values, cache_rows, positions, window, scores, mixed):
    """Attend with ``span`` heads of one token that share their keys."""
    kv_heads, size = keys.shape[1], keys.shape[3]
    heads = mixed.shape[1] // size
    b, head = task * span // heads, task * span % heads
    seen = positions[b] + 1
    first = max(0, seen - window)
    attend(
        qkv[b, head * size : (head + span) * size],
        keys[cache_rows[b], head // (heads // kv_heads), first:seen],
        values[cache_rows[b], head // (heads // kv_heads), first:seen],
        scores[task * span : (task + 1) * span],
        mixed[b, head * size : (head + span) * size],
    )


@kernel(inner=True)
def _merge(x, attended, bo, norm, norm_bias, eps, parallel_block, h):
    """Add the attention to the residual stream, and normalise the FFN's input."""
    _add(bo, attended)
    if parallel_block:
        _norm(x, norm, norm_bias, eps, h)
    for b in range(x.shape[0]):
        for d in range(x.shape[1]):
            x[b, d] += attended[b, d]
    if not parallel_block:
        _norm(x, norm, norm_bias, eps, h)


@kernel(inner=True)
def _share(
    batch, num, wqkv, wqkv_mark, bqkv, wo, wo_mark, cos, sin, keys, values, cache_rows, positions, window, width,
    inputs, qkv, mixed, scores, attended, counters, helpers,
):  # fmt: skip
    """One thread's share of a block, from the prepared input to the output product."""
    size = keys.shape[3]
    heads = mixed.shape[1] // size
    product_share(inputs, num, wqkv, wqkv_mark, width, ROWS_PER_CHUNK, qkv, counters, 0)
    b = take(counters, 1)
    while b < batch:
        _place(qkv[b], bqkv, cos[b], sin[b], keys, values, cache_rows[b], positions[b], heads)
        finish(counters, 1)
        b = take(counters, 1)
    wait(counters, 1, batch)
    # Heads that share keys read them together, unless threads would be without work.
    span = heads // keys.shape[1] if batch * keys.shape[1] >= helpers else 1
    task = take(counters, 2)
    while task < batch * heads // span:
        _attend_task(task, span, qkv, keys, values, cache_rows, positions, window, scores, mixed)
        finish(counters, 2)
        task = take(counters, 2)
    wait(counters, 2, batch * heads // span)
    if take(counters, 3) == 0:
        prepare(mixed, wo_mark, width, inputs)
        finish(counters, 3)
    wait(counters, 3, 1)
    product_share(inputs, mixed.shape[1], wo, wo_mark, width, ROWS_PER_CHUNK, attended, counters, 4)


@kernel(parallel=True)
def _front(
    x, norm, norm_bias, ffn_norm, ffn_norm_bias, eps, parallel_block, wqkv, wqkv_mark, bqkv, wo, wo_mark, bo,
    cos, sin, keys, values, cache_rows, positions, window, width, inputs, h, qkv, mixed, scores, attended, counters,
    helpers,
):  # fmt: skip
    _norm(x, norm, norm_bias, eps, h)
    prepare(h, wqkv_mark, width, inputs)
    clear(counters)
    for _ in prange(helpers):
        _share(
            x.shape[0], x.shape[1], wqkv, wqkv_mark, bqkv, wo, wo_mark, cos, sin, keys, values, cache_rows, positions,
            window, width, inputs, qkv, mixed, scores, attended, counters, helpers,
        )  # fmt: skip
    _merge(x, attended, bo, ffn_norm, ffn_norm_bias, eps, parallel_block, h)


def _absent() -> np.ndarray:
    return np.empty(0, np.float32)


@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    """One layer's attention, as the host kernels read it. An empty bias is none.

    Attributes:
        norm, ffn_norm: float32 [D], scales in front of attention and FFN.
        wqkv: packed rows of query, key and value heads, [(N + 2K) H, D].
        wo: packed rows [D, N H].
        norm_bias, ffn_norm_bias: float32 [D]: they make layer norms of the RMS norms.
        bqkv: float32 [(N + 2K) H], added before the rotation.
        bo: float32 [D].
    """

    norm: Float[np.ndarray, " D"]
    ffn_norm: Float[np.ndarray, " D"]
    wqkv: PackedRows
    wo: PackedRows
    norm_bias: Float[np.ndarray, " d"] = field(default_factory=_absent)
    ffn_norm_bias: Float[np.ndarray, " d"] = field(default_factory=_absent)
    bqkv: Float[np.ndarray, " rows"] = field(default_factory=_absent)
    bo: Float[np.ndarray, " d"] = field(default_factory=_absent)


class HostAttention:
    """Runs attention blocks of single tokens, with scratch that is shared by all layers.

    Args:
        config: sizes of the model.
        batch: B, the most sequences in a step.
        length: S, positions of a cache.
        activations: of the products with packed rows; as for ``products.matvec``.
    """

    def __init__(self, config: ModelConfig, *, batch: int, length: int, activations: str = "float32") -> None:
        self.config, self.batch, self.activations = config, batch, activations
        self._counters = np.zeros(STAGES * STAGE_BYTES // 8, np.int64)
        widest = max(config.d_model, config.num_heads * config.head_dim)
        self._inputs = np.empty(rows.prepared_floats(widest, len(rows.width_of(batch))), np.float32)
        heads = config.num_heads + 2 * config.num_kv_heads
        self._qkv = np.empty((batch, heads * config.head_dim), np.float32)
        self._mixed = np.empty((batch, config.num_heads * config.head_dim), np.float32)
        self._scores = np.empty((batch * config.num_heads, length), np.float32)
        self._h = np.empty((batch, config.d_model), np.float32)
        self._attended = np.empty((batch, config.d_model), np.float32)
        self._window = length if config.sliding_window is None else config.sliding_window

    def front(
        self,
        weights: AttentionWeights,
        x: Float[np.ndarray, "n D"],
        keys: Float[np.ndarray, "B K S H"],
        values: Float[np.ndarray, "B K S H"],
        cache_rows: Int[np.ndarray, " n"],
        positions: Int[np.ndarray, " n"],
        cos: Float[np.ndarray, "n half"],
        sin: Float[np.ndarray, "n half"],
    ) -> Float[np.ndarray, "n D"]:
        """Attend at one new position of each of n sequences.

        Args:
            weights: of the layer.
            x: residual stream, updated in place.
            keys, values: the layer's cache, updated in place.
            cache_rows: each sequence's row of the cache, int32 [n], none twice.
            positions: of the new tokens, int32 [n], inside the cache.
            cos, sin: of the rotary angles at these positions; [n, 0] turns nothing.

        Returns:
            The FFN's normalised input [n, D]; overwritten by the next call.
        """
        n = len(x)
        with threads.own() as helpers:
            _front(
                x, weights.norm, weights.norm_bias, weights.ffn_norm, weights.ffn_norm_bias,
                np.float32(self.config.norm_eps), self.config.parallel_block,
                weights.wqkv.data, rows.mark_of(weights.wqkv.format, self.activations), weights.bqkv,
                weights.wo.data, rows.mark_of(weights.wo.format, self.activations), weights.bo,
                cos, sin, keys, values, cache_rows, positions, self._window, rows.width_of(n), self._inputs,
                self._h[:n], self._qkv[:n], self._mixed[:n], self._scores, self._attended[:n],
                self._counters, helpers,
            )  # fmt: skip
        return self._h[:n]


def host_norm(
    x: Float[np.ndarray, "B D"],
    scale: Float[np.ndarray, " D"],
    bias: Float[np.ndarray, " D"] | None,
    eps: float,
) -> Float[np.ndarray, "B D"]:
    """Apply the RMS norm over D, or the layer norm where there is a bias, neither None nor empty; float32 [B, D]."""
    shifted = bias is not None and bias.size > 0
    if shifted:
        x = x - x.mean(axis=-1, keepdims=True)
    power = np.einsum("bd,bd->b", x, x)[:, None] / np.float32(x.shape[-1])
    normed = x * (1 / np.sqrt(power + np.float32(eps)))
    normed *= scale
    return normed + bias if shifted else normed
