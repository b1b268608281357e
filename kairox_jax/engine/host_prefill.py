"""Prefill beside the host's kernels, where the JAX device is the CPU itself: the cache is NumPy's, not the device's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

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
from kairox_jax.engine.programs import attend_length
from kairox_jax.models import KVCache, empty_cache


class HostPrefill(Prefill):
    """A ``Prefill`` whose programs get a copy of the positions that they read and nothing beyond.

    What a layer wrote is copied back when the next layer is on its way, so that the copy hides behind it. A piece of
    64 tokens took 298 ms with copies of whole rows, and 201 ms so (SmolLM2-135M, 2048 positions, 2 cores).

    Args:
        store, thresholds, scales: as for ``Prefill``.
        dense: the dense part, whose cache is filled.
    """

    def __init__(self, store: Any, dense: HostDense, **settings: Any) -> None:
        sizes = HOST_CHUNKS if dense.batch == 1 else HOST_BATCH_CHUNKS
        super().__init__(store, dense, sizes=sizes, **settings)
        self._host = dense
        self._written: tuple[int, KVCache, Sequence[Piece]] | None = None
        groups = [n for n in reversed(GROUPS) if n <= dense.batch]
        self._unprepared = [(n, size) for n in groups for size in sizes if n == 1 or n * size <= MAX_TOGETHER]

    def prepare(self) -> bool:
        """Compile one more shape of short prompts, which takes up to a second; return whether there was one.

        The cache is left alone.
        """
        if not self._unprepared:
            return False
        (n, size), config = self._unprepared.pop(0), self._host.config
        start, attend = np.zeros(n, np.int32), attend_length(size, self._host.length)
        ids = np.zeros((n, size), np.int32)
        for layer in {layout: layer for layer, layout in enumerate(self.store.layouts)}.values():
            cache, records = (
                empty_cache(config, batch=n, length=attend),
                jax.device_put(self.store.layers[layer]),
            )
            x: Any = self._host.embed(ids, start)
            for _ in range(2):  # the first layer gets an array of NumPy's, the others one of JAX's
                x, cache = self._run_layer(layer, records, x, start, None, cache, attend)
            last_rows(x, start).block_until_ready()
        return True

    def _run(self, ids: Int[np.ndarray, "n T"], prompts: Sequence[Piece]) -> Float[Array, "n T D"]:
        self._written = None  # of a piece that was interrupted
        x = super()._run(ids, prompts)
        self._copy_back()
        return x

    def _take_cache(self, layer: int, prompts: Sequence[Piece], attend: int) -> tuple[KVCache, None]:
        rows = [piece.row for piece in prompts]
        keys, values = self._host.keys[layer], self._host.values[layer]
        return KVCache(jnp.array(keys[rows, :, :attend]), jnp.array(values[rows, :, :attend])), None

    def _put_cache(self, layer: int, cache: KVCache, prompts: Sequence[Piece]) -> None:
        self._copy_back()
        self._written = layer, cache, prompts

    def _copy_back(self) -> None:
        if self._written is None:
            return
        layer, cache, prompts = self._written
        keys, values = np.asarray(cache.k), np.asarray(cache.v)
        for index, piece in enumerate(prompts):
            new = slice(piece.start, piece.start + len(piece.ids))
            self._host.keys[layer, piece.row, :, new] = keys[index, :, new]
            self._host.values[layer, piece.row, :, new] = values[index, :, new]
        self._written = None
