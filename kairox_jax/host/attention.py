"""The dense part of a decode step on the host: norm, attention with its cache, and the FFN's input.

For machines without an accelerator: XLA's CPU backend spends most of a single-token attention block on waking
threads, these kernels read packed weights in one pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np
from jaxtyping import Float, Int

from kairox_jax.config import ModelConfig
from kairox_jax.host import attention_loops, prompt_block, rows, threads
from kairox_jax.host.calls import (
    COUNTERS,
    aligned,
    aligned_zeros,
    check_floats,
    check_places,
    read_only,
    room_for,
)
from kairox_jax.quant import PackedRows


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

    def __post_init__(self) -> None:
        for name in (part.name for part in fields(self)):
            value = getattr(self, name)
            packed = isinstance(value, PackedRows)
            same = replace(value, data=read_only(value.data)) if packed else read_only(value)
            object.__setattr__(self, name, same)


class HostAttention:
    """Runs attention blocks of single tokens, and of a prompt's, with scratch that is shared by all layers.

    Args:
        config: sizes of the model.
        batch: B, the most sequences in a step.
        length: S, positions of a cache.
        activations: of the products with packed rows; as for ``products.matvec``.
    """

    def __init__(self, config: ModelConfig, *, batch: int, length: int, activations: str = "float32") -> None:
        self.config, self.batch, self.activations = config, batch, activations
        widest = max(config.d_model, config.num_heads * config.head_dim)
        self._inputs = aligned_zeros(rows.prepared_floats(widest, len(rows.width_of(batch))))
        heads = config.num_heads + 2 * config.num_kv_heads
        self._qkv = np.empty((batch, heads * config.head_dim), np.float32)
        self._mixed = np.empty((batch, config.num_heads * config.head_dim), np.float32)
        self._h = np.empty((batch, config.d_model), np.float32)
        self._attended = np.empty((batch, config.d_model), np.float32)
        self._prompt = np.empty((0, config.d_model), np.float32)
        self._window = length if config.sliding_window is None else config.sliding_window

    def _check(
        self,
        x: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        cache_rows: np.ndarray,
        positions: np.ndarray,
        cos: np.ndarray,
        sin: np.ndarray,
    ) -> None:
        config = self.config
        check_floats("x", x, (None, config.d_model), written=True)
        for name, cache in (("keys", keys), ("values", values)):
            check_floats(name, cache, (None, config.num_kv_heads, None, config.head_dim), written=True)
        check_places(len(x), cos, sin, cache_rows, positions)

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

        Raises:
            ValueError: shapes or types do not fit. Rows and positions outside the cache are not looked for.
        """
        self._check(x, keys, values, cache_rows, positions, cos, sin)
        n = len(x)
        if n > self.batch:
            raise ValueError(
                f"x holds {n} tokens: this attention was made for at most {self.batch} in a step"
            )
        with threads.own() as helpers:
            attention_loops.front(
                x, weights.norm, weights.norm_bias, weights.ffn_norm, weights.ffn_norm_bias,
                np.float32(self.config.norm_eps), self.config.parallel_block,
                weights.wqkv.data, rows.mark_of(weights.wqkv.format, self.activations), weights.bqkv,
                weights.wo.data, rows.mark_of(weights.wo.format, self.activations), weights.bo,
                cos, sin, keys, values, cache_rows, positions, self._window, rows.width_of(n), self._inputs,
                self._h[:n], self._qkv[:n], self._mixed[:n], self._attended[:n], COUNTERS, helpers,
            )  # fmt: skip
        return self._h[:n]

    def prompt(
        self,
        weights: AttentionWeights,
        x: Float[np.ndarray, "T D"],
        keys: Float[np.ndarray, "B K S H"],
        values: Float[np.ndarray, "B K S H"],
        cache_rows: Int[np.ndarray, " T"],
        positions: Int[np.ndarray, " T"],
        cos: Float[np.ndarray, "T half"],
        sin: Float[np.ndarray, "T half"],
    ) -> Float[np.ndarray, "T D"]:
        """Attend at many new positions, as a prompt has them; of a sequence they follow each other.

        Arguments and result as for ``front``; activations are never rounded.
        """
        self._check(x, keys, values, cache_rows, positions, cos, sin)
        count, config = len(x), self.config
        size = config.num_heads * config.head_dim
        with threads.own() as helpers:
            tokens = room_for(count, max(config.d_model, size))
            if len(self._prompt) < count:
                self._prompt = np.empty((count, config.d_model), np.float32)
            # Its reader comes after another engine may have been the owner: the shared scratch will not do.
            h, attended = self._prompt[:count], aligned("attended", count, config.d_model)
            qkv = aligned("qkv", count, len(weights.wqkv.data))
            prompt_block.block(
                x, weights.norm, weights.norm_bias, weights.ffn_norm, weights.ffn_norm_bias,
                np.float32(config.norm_eps), config.parallel_block,
                weights.wqkv.data, rows.MARKS[weights.wqkv.format], weights.bqkv,
                weights.wo.data, rows.MARKS[weights.wo.format], weights.bo,
                cos, sin, keys, values, cache_rows, positions, self._window, tokens, h, qkv,
                aligned("mixed", count, size), attended, COUNTERS, helpers,
            )  # fmt: skip
        return h


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
