"""Prefill beside the host's kernels, where the JAX device is the CPU itself: cache and matrices are NumPy's.

XLA's CPU backend unpacks a layer of SmolLM2-135M in 1.6 ms on two threads, a host kernel in 0.6 ms on one: it writes a
slice of a layer's neurons to scratch that the programs read, while XLA multiplies by the slice before.
"""

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
from kairox_jax.engine.prefill_programs import add_neurons, prompt_front_program
from kairox_jax.engine.programs import attend_length
from kairox_jax.host import unpack_neurons
from kairox_jax.models import KVCache, empty_cache
from kairox_jax.quant.columns import BLOCK

SLICE_BYTES = 32 << 20  # of a layer's matrices in float32
CACHE_LINE = 64  # bytes; XLA reads an array in place that begins at one


class Scratch:
    """Room for the matrices of some neurons, seen by NumPy and by JAX.

    Args:
        num_rows: R, rows of a record.
        most: the most neurons.
        width: D.
    """

    def __init__(self, num_rows: int, most: int, width: int) -> None:
        self._matrices = [_aligned(most, width) for _ in range(num_rows)]
        self._views: dict[int, tuple[Array, ...]] = {}
        self._reader: Any = None  # what is computed from the matrices

    def free(self, count: int) -> list[Float[np.ndarray, "n D"]]:
        """Wait until nothing reads the matrices; returns the first ``count`` rows of each, to be overwritten."""
        if self._reader is not None:
            self._reader.block_until_ready()
        return [matrix[:count] for matrix in self._matrices]

    def read(self, count: int) -> tuple[Float[Array, "n D"], ...]:
        """Return the same rows for a program; say with ``read_by`` what it computes."""
        if count not in self._views:
            self._views[count] = tuple(jax.dlpack.from_dlpack(matrix[:count]) for matrix in self._matrices)
        return self._views[count]

    def read_by(self, result: Any) -> None:
        """Keep the rows until ``result`` is there."""
        self._reader = result


def _aligned(*shape: int) -> np.ndarray:
    size = int(np.prod(shape))
    raw = np.empty(size + CACHE_LINE // 4, np.float32)
    first = -raw.ctypes.data % CACHE_LINE // 4
    return raw[first : first + size].reshape(shape)


def slices(num_neurons: int, neuron_bytes: int) -> list[tuple[int, int]]:
    """Cut neurons into slices of at most ``SLICE_BYTES``, at multiples of ``BLOCK``; returns the ends of each."""
    size = max(SLICE_BYTES // neuron_bytes // BLOCK, 1) * BLOCK
    return [(first, min(first + size, num_neurons)) for first in range(0, num_neurons, size)]


class HostPrefill(Prefill):
    """A ``Prefill`` whose programs get a copy of the positions that they read and nothing beyond.

    What a layer wrote is copied back when the next layer is on its way, so that the copy hides behind it.

    Args:
        store, thresholds, scales: as for ``Prefill``.
        dense: the dense part, whose cache is filled.
    """

    def __init__(self, store: Any, dense: HostDense, **settings: Any) -> None:
        sizes = HOST_CHUNKS if dense.batch == 1 else HOST_BATCH_CHUNKS
        super().__init__(store, dense, sizes=sizes, **settings)
        self._host = dense
        self._front = prompt_front_program(dense.rebuild, dense.config)
        num_rows, width = len(store.layouts[0].formats), dense.config.d_model
        self._slices = slices(dense.config.num_neurons, 4 * num_rows * width)
        most = self._slices[0][1]
        self._scratch = [Scratch(num_rows, most, width) for _ in range(2)]
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
        for _ in range(2):  # the first layer gets an array of NumPy's, the others one of JAX's
            x, new = self._run_layer(0, x, start, cache, attend)
            cache = None if attend is None else new
        last_rows(x, start).block_until_ready()
        return True

    def _run(self, ids: Int[np.ndarray, "n T"], prompts: Sequence[Piece]) -> Float[Array, "n T D"]:
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
        self, layer: int, x: Any, start: Int[np.ndarray, " n"], cache: KVCache | None, attend: int | None
    ) -> tuple[Float[Array, "n T D"], KVCache]:
        store, host = self.store, self._host
        up_bias, down_bias = self._biases[layer] or (None, None)
        x, h, cache = self._front(
            host.attention[layer], host.ffn_norms[layer], down_bias, x, start, cache, attend
        )
        threshold = np.float32(self.thresholds[layer])
        for number, (first, last) in enumerate(self._slices):
            scratch = self._scratch[(layer * len(self._slices) + number) % 2]
            unpack_neurons(
                store.layers[layer],
                store.layouts[layer],
                store.scales[layer],
                first,
                scratch.free(last - first),
            )
            bias = None if up_bias is None else up_bias[first:last]
            x = add_neurons(x, h, scratch.read(last - first), bias, threshold, host.config.activation)
            scratch.read_by(x)
        return x, cache

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
