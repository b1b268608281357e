"""Prefill: many tokens at once, dense, layer by layer, with each layer's neurons streamed to the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kairox_jax.config import ModelConfig
from kairox_jax.engine.dense_part import DeviceDense
from kairox_jax.engine.prefill_programs import prefill_program
from kairox_jax.engine.programs import attend_length, some_rows
from kairox_jax.placement import NeuronStore
from kairox_jax.quant import SharedScales

CHUNKS = (16, 64, 256)  # padded lengths of a piece of prompt, so that three shapes compile
# On a CPU device, where no weight is streamed and a padded token costs as much as any other.
HOST_CHUNKS = (16, 32, 64, 128, 256)
# Of a batch: a piece of 128 tokens of SmolLM2-135M holds the others up for 0.2 s, one of 256 for 0.3 s.
HOST_BATCH_CHUNKS = (16, 32, 64, 128)
# Prompts that run in one piece, and its padded tokens. One of 64 tokens takes 106 ms, two 188 ms, four 328 ms, because
# every neuron is unpacked once for all of them (on an accelerator: streamed to it).
GROUPS, MAX_TOGETHER = (4, 2, 1), 256
# So many steps at a prompt's end are shorter than one more piece: of SmolLM2-135M on 2 cores a step of 8 tokens takes
# 28 ms and a piece of 16 takes 58 ms.
LAST_STEPS = 2


class Piece(NamedTuple):
    """Consecutive tokens of a prompt, int32 [T], the position of the first, and the sequence's row of the cache."""

    ids: Int[np.ndarray, " T"]
    start: int
    row: int


class DensePart(Protocol):
    """What the prefill needs of the dense part; how to reach the cache is told by ``Prefill``'s subclasses."""

    config: ModelConfig
    length: int
    down_biases: list[np.ndarray] | None

    def embed(self, ids: Int[np.ndarray, "B T"], start: Int[np.ndarray, " B"]) -> Any:
        """Return the residual stream before the first layer; ``start`` is the first token's position."""
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
        sizes: Sequence[int],
    ) -> None:
        self.sizes = sizes
        self.store, self.dense, self.thresholds, self.scales = store, dense, thresholds, scales

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
        for first, last, _ in pieces(start, len(ids), self.sizes):
            x_last = self.together([Piece(ids[first - start : last - start], first, row)])
        assert x_last is not None
        return x_last

    def together(self, prompts: Sequence[Piece]) -> Float[Array, "n D"]:
        """Run one piece of each of n sequences, none twice; see ``__call__``."""
        longest = max(len(piece.ids) for piece in prompts)
        ids = np.zeros((len(prompts), next(size for size in self.sizes if size >= longest)), np.int32)
        for index, piece in enumerate(prompts):
            ids[index, : len(piece.ids)] = piece.ids
        x = self._run(ids, prompts)
        at = np.array([len(piece.ids) - 1 for piece in prompts], np.int32)
        return last_rows(x, at)

    def _run(
        self, ids: Int[np.ndarray, "n T"], prompts: Sequence[Piece]
    ) -> Float[Array, "n T D"] | Float[np.ndarray, "n T D"]:
        """Run every layer over the padded tokens of one piece of each prompt, and fill the cache."""
        raise NotImplementedError

    def prepare(self) -> bool:
        """Compile one more shape of a piece while nothing else is to do; return whether there was one."""
        return False


class DevicePrefill(Prefill):
    """A ``Prefill`` whose cache is on the device; each layer's records are sent there one layer ahead."""

    def __init__(self, store: NeuronStore, dense: DeviceDense, **settings: Any) -> None:
        super().__init__(store, dense, sizes=CHUNKS, **settings)
        self._on_device = dense
        self._layer = prefill_program(dense.rebuild, dense.config)
        self._biases: list[tuple[Array, Array] | None] = [None] * dense.config.num_layers
        if store.biases is not None and dense.down_biases is not None:
            pairs = zip(store.biases, dense.down_biases, strict=True)
            self._biases = [(jnp.asarray(up[:, -1]), jnp.asarray(down)) for up, down in pairs]

    def _run(self, ids: Int[np.ndarray, "n T"], prompts: Sequence[Piece]) -> Float[Array, "n T D"]:
        dense = self._on_device
        start = np.array([piece.start for piece in prompts], np.int32)
        rows = some_rows(np.array([piece.row for piece in prompts], np.int32), dense.batch)
        x = dense.embed(ids, start)
        attend = attend_length(int(start.max()) + ids.shape[1], dense.length)
        records = jax.device_put(self.store.layers[0])
        for layer in range(dense.config.num_layers):
            ahead = layer + 1 < dense.config.num_layers
            following = jax.device_put(self.store.layers[layer + 1]) if ahead else None
            x, dense.caches[layer] = self._layer(
                dense.attention[layer],
                dense.ffn_norms[layer],
                records,
                self.scales[layer],
                self._biases[layer],
                np.float32(self.thresholds[layer]),
                x,
                start,
                rows,
                dense.caches[layer],
                attend,
                self.store.layouts[layer],
            )
            records = following
        return x


@jax.jit
def last_rows(x: Float[Array, "n T D"], at: Int[Array, " n"]) -> Float[Array, "n D"]:
    """Return each sequence's vector at its position ``at``."""
    return jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
