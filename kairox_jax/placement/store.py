"""The neuron store: every FFN neuron's record in host memory, contiguous, and its gathering into staging."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Float, Int

from kairox_jax.config import ModelConfig

GATED_ROWS = ("w_gate", "w_up", "w_down")
ALIGNMENT = 64  # bytes; JAX's CPU backend takes an aligned NumPy array without a copy


class TensorSource(Protocol):
    """What the store needs of a checkpoint."""

    config: ModelConfig

    def tensor(self, name: str) -> np.ndarray:
        """Return a fresh float32 array by canonical name."""
        ...


def aligned_empty(shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
    """Return an uninitialised float32 array whose first byte is aligned to ``ALIGNMENT``."""
    size = int(np.prod(shape)) * 4
    raw = np.empty(size + ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + size].view(np.float32).reshape(shape)


@dataclass(frozen=True, kw_only=True)
class NeuronStore:
    """Records of all layers.

    Attributes:
        layers: one array a layer, float32 [F, R, D]: the gate row, up row and down column of a neuron lie together.
    """

    layers: tuple[Float[np.ndarray, "F R D"], ...]

    @property
    def record_bytes(self) -> int:
        """Bytes of one neuron's record."""
        return self.layers[0][0].nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(layer.nbytes for layer in self.layers)

    def gather(
        self, layer: int, ids: Int[np.ndarray, " n"], *, rows: int | None = None
    ) -> Float[np.ndarray, "M R D"]:
        """Copy records into a fresh staging buffer.

        The buffer is new at each call because a transfer may still read it after this function's caller has moved on.

        Args:
            layer: index of the layer.
            ids: neurons, int32 [n].
            rows: length M of the buffer, at least n; the rows after n are left as they are. None takes n.

        Returns:
            float32 [M, R, D].
        """
        records = self.layers[layer]
        staging = aligned_empty((len(ids) if rows is None else rows, *records.shape[1:]))
        np.take(records, ids, axis=0, out=staging[: len(ids)], mode="clip")
        return staging


def record_shape(config: ModelConfig) -> tuple[int, int]:
    """Return (R, D) of a record."""
    return len(GATED_ROWS), config.d_model


def load_store(source: TensorSource, *, progress: Callable[[int], None] = lambda layer: None) -> NeuronStore:
    """Read every neuron of a checkpoint into records.

    Args:
        source: an open checkpoint.
        progress: called with the index of each finished layer.

    Returns:
        The store, read-only.
    """
    config = source.config
    layers = []
    for layer in range(config.num_layers):
        records = aligned_empty((config.num_neurons, *record_shape(config)))
        for row, name in enumerate(GATED_ROWS):
            records[:, row] = source.tensor(f"layers.{layer}.{name}")
        records.flags.writeable = False
        layers.append(records)
        progress(layer)
    return NeuronStore(layers=tuple(layers))
