"""Prefill: many tokens at once, dense, layer by layer, with each layer's neurons streamed to the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kairox_jax.engine.dense_part import DeviceDense
from kairox_jax.engine.prefill_programs import prefill_program
from kairox_jax.engine.programs import attend_length, some_rows
from kairox_jax.placement import NeuronStore
from kairox_jax.quant import SharedScales

CHUNKS = (16, 64, 256)  # padded lengths of a piece of prompt, so that three shapes compile
GROUPS, MAX_TOGETHER = (4, 2, 1), 256  # prompts that run in one piece, and its padded tokens


class Piece(NamedTuple):
    """Consecutive tokens of a prompt, int32 [T], the position of the first, and the sequence's row of the cache."""

    ids: Int[np.ndarray, " T"]
    start: int
    row: int


def pieces(start: int, length: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut ``length`` tokens from position ``start`` on: yields (first, last, padded length) of each piece."""
    first, end = start, start + length
    while first < end:
        size = next((c for c in sizes if c >= end - first), sizes[-1])
        last = min(first + size, end)
        yield first, last, size
        first = last


def share_padded(left: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return how many tokens of each prompt's rest to run together, padded to one length; see ``Prefill.share``.

    Others than the first take part where their piece is padded to as many tokens, or to half as many.
    """
    planned = [next(pieces(0, length, sizes)) for length in left]
    size = planned[0][2]
    alike = [index for index, (_, _, padded) in enumerate(planned) if padded in (size, size // 2)]
    count = next(n for n in GROUPS if n <= len(alike) and n * size <= max(size, MAX_TOGETHER))
    return [tokens if index in alike[:count] else 0 for index, (_, tokens, _) in enumerate(planned)]


class Prefill(Protocol):
    """Runs prompts through a hybrid model."""

    def share(self, left: Sequence[int], *, beside: int = 0) -> list[int]:
        """Return how many tokens of each prompt's rest to run in the next piece; 0 for one that waits.

        Args:
            left: tokens of each prompt that are still to run, at least one. The first does not wait.
            beside: sequences that decode a token in the same piece. Only the host's kernels take some.
        """
        ...

    def together(self, prompts: Sequence[Piece]) -> Float[Any, "n D"]:
        """Run one piece of each of n sequences, none twice.

        Returns:
            The residual stream after the last layer at each piece's last token.
        """
        ...


class DevicePrefill:
    """A ``Prefill`` whose cache is on the device; each layer's records are sent there one layer ahead.

    Args:
        store: every neuron's record.
        dense: the dense part, whose cache is filled.
        thresholds: activation threshold of each layer, float32 [L].
        scales: the store's tables, on the device.
    """

    def __init__(
        self,
        store: NeuronStore,
        dense: DeviceDense,
        *,
        thresholds: Float[np.ndarray, " L"],
        scales: Sequence[SharedScales | None],
    ) -> None:
        self.store, self.dense, self.thresholds, self.scales = store, dense, thresholds, scales
        self._layer = prefill_program(dense.rebuild, dense.config)
        self._biases: list[tuple[Array, Array] | None] = [None] * dense.config.num_layers
        if store.biases is not None and dense.down_biases is not None:
            pairs = zip(store.biases, dense.down_biases, strict=True)
            self._biases = [(jnp.asarray(up[:, -1]), jnp.asarray(down)) for up, down in pairs]

    def share(self, left: Sequence[int], *, beside: int = 0) -> list[int]:
        """Choose pieces that are padded alike."""
        return share_padded(left, CHUNKS)

    def together(self, prompts: Sequence[Piece]) -> Float[Array, "n D"]:
        """Run the pieces, padded to one length."""
        longest = max(len(piece.ids) for piece in prompts)
        ids = np.zeros((len(prompts), next(size for size in CHUNKS if size >= longest)), np.int32)
        for index, piece in enumerate(prompts):
            ids[index, : len(piece.ids)] = piece.ids
        at = np.array([len(piece.ids) - 1 for piece in prompts], np.int32)
        return _last_rows(self._run(ids, prompts), at)

    def _run(self, ids: Int[np.ndarray, "n T"], prompts: Sequence[Piece]) -> Float[Array, "n T D"]:
        """Run every layer over the padded tokens of one piece of each prompt, and fill the cache."""
        dense = self.dense
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
def _last_rows(x: Float[Array, "n T D"], at: Int[Array, " n"]) -> Float[Array, "n D"]:
    """Return each sequence's vector at its position ``at``."""
    return jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
