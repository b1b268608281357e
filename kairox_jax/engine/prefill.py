"""Prefill: many tokens at once, dense, layer by layer, with each layer's neurons streamed to the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kairox_jax.config import ModelConfig
from kairox_jax.engine.programs import Leaves, Rebuild, attend_length, prefill_program
from kairox_jax.models import KVCache, Norm
from kairox_jax.placement import NeuronStore
from kairox_jax.quant import SharedScales

CHUNKS = (16, 64, 256)  # padded lengths of a piece of prompt, so that three shapes compile
# On a CPU device, where no weight is streamed and a padded token costs as much as any other.
HOST_CHUNKS = (16, 32, 64, 128, 256)
# Of a batch: a piece of 128 tokens of SmolLM2-135M holds the others up for 0.3 s, one of 256 for 0.5 s.
HOST_BATCH_CHUNKS = HOST_CHUNKS[:-1]
# So many steps at a prompt's end are shorter than one more piece: of SmolLM2-135M on 2 cores a step of 8 tokens takes
# 45 ms and a piece of 16 takes 105 ms, because every neuron is unpacked for it (or streamed to an accelerator).
LAST_STEPS = 2


class DensePart(Protocol):
    """What the prefill needs of the dense part."""

    config: ModelConfig
    length: int
    rebuild: Rebuild
    attention: list[Leaves]
    ffn_norms: list[Norm[Array]]
    down_biases: list[np.ndarray] | None

    def embed(self, ids: Int[np.ndarray, "B T"], start: Int[np.ndarray, " B"]) -> Any:
        """Return the residual stream before the first layer; ``start`` is the first token's position."""
        ...

    def cache(self, layer: int, row: int) -> tuple[KVCache, Int[np.ndarray, " 1"] | None]:
        """Return a layer's cache, which the prefill donates, and where in it the sequence ``row`` is."""
        ...

    def put_cache(self, layer: int, cache: KVCache, row: int, *, start: int, end: int) -> None:
        """Take a layer's cache back, with positions ``start`` .. ``end - 1`` of a sequence new."""
        ...


def pieces(start: int, length: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut ``length`` tokens from position ``start`` on: yields (first, last, padded length) of each piece."""
    first, end = start, start + length
    while first < end:
        size = next((c for c in sizes if c >= end - first), sizes[-1])
        last = min(first + size, end)
        yield first, last, size
        first = last


def whole_pieces(length: int, few: int, sizes: Sequence[int]) -> int:
    """Return how many of a prompt's tokens fill pieces to the end, where at most ``few`` are left; else all of them."""
    rest = length % sizes[-1]
    rest -= max((size for size in sizes if size <= rest), default=0) if rest > few else 0
    return length - rest if rest <= few else length


class Prefill:
    """Runs prompts through a hybrid model.

    Args:
        store: every neuron's record.
        dense: the dense part, whose cache is filled.
        thresholds: activation threshold of each layer, float32 [L].
        scales: the store's tables, on the device.
        sizes: padded lengths of a piece, ascending.
    """

    def __init__(
        self,
        store: NeuronStore,
        dense: DensePart,
        *,
        thresholds: Float[np.ndarray, " L"],
        scales: Sequence[SharedScales | None],
        sizes: Sequence[int] = CHUNKS,
    ) -> None:
        self.sizes = sizes
        self.store, self.dense, self.thresholds, self.scales = store, dense, thresholds, scales
        self._layer = prefill_program(dense.rebuild, dense.config)
        self._biases: list[tuple[Array, Array] | None] = [None] * dense.config.num_layers
        if store.biases is not None and dense.down_biases is not None:
            pairs = zip(store.biases, dense.down_biases, strict=True)
            self._biases = [(jnp.asarray(up[:, -1]), jnp.asarray(down)) for up, down in pairs]

    def __call__(self, ids: Int[np.ndarray, " T"], start: int, row: int) -> Float[Array, "1 D"]:
        """Run the tokens of one sequence.

        Args:
            ids: int32 [T], T at least 1.
            start: position of the first of them.
            row: the sequence's row of the cache.

        Returns:
            The residual stream after the last layer at the last token [1, D].
        """
        x_last = None
        for first, last, size in pieces(start, len(ids), self.sizes):
            padded = np.zeros((1, size), np.int32)
            padded[0, : last - first] = ids[first - start : last - start]
            x = self._run_piece(padded, first, last, row)
            x_last = jax.lax.dynamic_index_in_dim(x, last - first - 1, axis=1, keepdims=False)
        assert x_last is not None
        return x_last

    def _run_piece(
        self, ids: Int[np.ndarray, "1 T"], first: int, last: int, row: int
    ) -> Float[Array, "1 T D"]:
        dense = self.dense
        start = np.array([first], np.int32)
        x = dense.embed(ids, start)
        attend = attend_length(first + ids.shape[1], dense.length)
        records = jax.device_put(self.store.layers[0])
        for layer in range(dense.config.num_layers):
            ahead = layer + 1 < dense.config.num_layers
            following = jax.device_put(self.store.layers[layer + 1]) if ahead else None
            cache, rows = self._take_cache(layer, row, attend)
            x, cache = self._layer(
                dense.attention[layer],
                dense.ffn_norms[layer],
                records,
                self.scales[layer],
                self._biases[layer],
                np.float32(self.thresholds[layer]),
                x,
                start,
                rows,
                cache,
                attend,
                self.store.layouts[layer],
            )
            self._put_cache(layer, cache, row, first, last)
            records = following
        return x

    def _take_cache(self, layer: int, row: int, attend: int) -> tuple[KVCache, Int[np.ndarray, " 1"] | None]:
        """Return what the program reads and donates, and where in it the sequence is."""
        del attend
        return self.dense.cache(layer, row)

    def _put_cache(self, layer: int, cache: KVCache, row: int, first: int, last: int) -> None:
        """Keep the new positions ``first`` .. ``last - 1``."""
        self.dense.put_cache(layer, cache, row, start=first, end=last)
