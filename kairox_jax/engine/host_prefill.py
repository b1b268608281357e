"""Prefill beside the host's kernels, where the JAX device is the CPU itself: cache and matrices are NumPy's.

XLA mixes the heads of the attention. Host kernels multiply by the matrices: they unpack each weight once for all
tokens, and for 64 of them multiply twice as fast as XLA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from kairox_jax.engine.host_dense import HostDense
from kairox_jax.engine.prefill import (
    GROUPS,
    HOST_BATCH_CHUNKS,
    HOST_CHUNKS,
    MAX_TOGETHER,
    Piece,
    Prefill,
    last_rows,
)
from kairox_jax.engine.prefill_programs import mix_program
from kairox_jax.engine.programs import attend_length
from kairox_jax.host import LayerFfn, host_norm, matmul
from kairox_jax.models import KVCache, empty_cache
from kairox_jax.quant import PackedRows


class HostPrefill(Prefill):
    """A ``Prefill`` whose programs get a copy of the positions that they read and nothing beyond.

    What a layer wrote is copied back when the next layer is on its way, so that the copy hides behind it.

    Args:
        store, thresholds, scales: as for ``Prefill``.
        dense: the dense part, whose cache is filled.
        ffns: of each layer.
    """

    def __init__(self, store: Any, dense: HostDense, *, ffns: Sequence[LayerFfn], **settings: Any) -> None:
        sizes = HOST_CHUNKS if dense.batch == 1 else HOST_BATCH_CHUNKS
        super().__init__(store, dense, sizes=sizes, **settings)
        self._host = dense
        self._ffns = ffns
        groups = [n for n in reversed(GROUPS) if n <= dense.batch]
        shapes = [(n, size) for n in groups for size in sizes if n == 1 or n * size <= MAX_TOGETHER]
        self._unprepared: list[tuple[int, int, int | None]] = [(n, size, None) for n, size in shapes]
        # A prompt that begins as an earlier one, or is longer than a piece.
        self._unprepared += [(n, size, attend_length(size, dense.length)) for n, size in shapes if n == 1]

    def prepare(self) -> bool:
        """Compile one more shape of short prompts, which takes up to a second; return whether there was one.

        The cache is left alone.
        """
        if not self._unprepared:
            return False
        (n, size, attend), config = self._unprepared.pop(0), self._host.config
        start, ids = np.zeros(n, np.int32), np.zeros((n, size), np.int32)
        cache = None if attend is None else empty_cache(config, batch=n, length=attend)
        x: Any = self._host.embed(ids, start)
        x, _ = self._run_layer(0, x, start, cache, attend)
        last_rows(x, start).block_until_ready()
        return True

    def _run(self, ids: Int[np.ndarray, "n T"], prompts: Sequence[Piece]) -> Float[np.ndarray, "n T D"]:
        start = np.array([piece.start for piece in prompts], np.int32)
        # A prompt from its beginning on reads nothing of the cache.
        attend = attend_length(int(start.max()) + ids.shape[1], self._host.length) if start.any() else None
        x: Any = self._host.embed(ids, start)
        written: KVCache | None = None
        for layer in range(self._host.config.num_layers):
            before = None if attend is None else self._take_cache(layer, prompts, attend)
            x, cache = self._run_layer(layer, x, start, before, attend)
            if written is not None:
                self._put_cache(layer - 1, written, prompts)
            written = cache
        assert written is not None
        self._put_cache(self._host.config.num_layers - 1, written, prompts)
        return x

    def _run_layer(
        self,
        layer: int,
        x: Float[np.ndarray, "n T D"],
        start: Int[np.ndarray, " n"],
        cache: KVCache | None,
        attend: int | None,
    ) -> tuple[Float[np.ndarray, "n T D"], KVCache]:
        host, weights, config = self._host, self._host.weights[layer], self._host.config
        flat = x.reshape(-1, config.d_model)
        qkv = _product(
            host_norm(flat, weights.norm, weights.norm_bias, config.norm_eps), weights.wqkv, weights.bqkv
        )
        mixed, filled = mix_program(config, qkv.reshape(*x.shape[:2], -1), start, cache, attend)
        attended = flat + _product(np.asarray(mixed).reshape(len(flat), -1), weights.wo, weights.bo)
        before = flat if config.parallel_block else attended
        h = host_norm(before, weights.ffn_norm, weights.ffn_norm_bias, config.norm_eps)
        if host.down_biases is not None:
            attended += host.down_biases[layer]
        self._ffns[layer].add_all(h, attended)
        return attended.reshape(x.shape), filled

    def _take_cache(self, layer: int, prompts: Sequence[Piece], attend: int) -> KVCache:
        rows = [piece.row for piece in prompts]
        keys, values = self._host.keys[layer], self._host.values[layer]
        return KVCache(jnp.array(keys[rows, :, :attend]), jnp.array(values[rows, :, :attend]))

    def _put_cache(self, layer: int, cache: KVCache, prompts: Sequence[Piece]) -> None:
        keys, values = np.asarray(cache.k), np.asarray(cache.v)
        for index, piece in enumerate(prompts):
            new = slice(piece.start, piece.start + len(piece.ids))
            self._host.keys[layer, piece.row, :, new] = keys[index, :, new]
            self._host.values[layer, piece.row, :, new] = values[index, :, new]


def _product(x: Float[np.ndarray, "T D"], matrix: PackedRows, bias: Float[np.ndarray, " n"]) -> np.ndarray:
    """Return x times the matrix plus the bias, which is empty where there is none; float32 [T, V]."""
    out = np.empty((len(x), len(matrix.data)), np.float32)
    matmul(x, matrix, out)
    return out + bias if bias.size else out
