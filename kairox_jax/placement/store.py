"""The neuron store: every FFN neuron's record in host memory, contiguous, and its gathering into staging."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Float, Int, UInt8

from kairox_jax.config import ModelConfig
from kairox_jax.quant import PackedRows, RecordLayout

ALIGNMENT = 64  # bytes; JAX's CPU backend takes an aligned NumPy array without a copy


class RowSource(Protocol):
    """What the store needs of a checkpoint."""

    @property
    def config(self) -> ModelConfig:
        """The model's facts."""
        ...

    def tensor(self, name: str) -> np.ndarray:
        """Return a fresh float32 array by canonical name."""
        ...

    def packed(self, name: str) -> PackedRows | None:
        """Return a matrix in the file's own rows, or None where it does not keep it by row."""
        ...

    def packed_format(self, name: str) -> str | None:
        """Return the format of what ``packed`` gives, without reading it."""
        ...

    def check_packed(self, name: str) -> None:
        """Raise where ``packed`` gives a NaN or an infinity."""
        ...

    def release(self) -> None:
        """Give back memory that reading took."""
        ...


def aligned_bytes(rows: int, row_bytes: int) -> UInt8[np.ndarray, "rows nbytes"]:
    """Return an uninitialised uint8 array whose first byte is aligned to ``ALIGNMENT``."""
    raw = np.empty(rows * row_bytes + ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + rows * row_bytes].reshape(rows, row_bytes)


@dataclass(frozen=True, kw_only=True)
class NeuronStore:
    """Records of all layers.

    Attributes:
        layout: formats and places of a record's rows, the same in every layer.
        layers: one array a layer, uint8 [F, record bytes]: gate row, up row and down column of a neuron.
        biases: one array a layer, float32 [F, R-1], or None for a model without.
    """

    layout: RecordLayout
    layers: tuple[UInt8[np.ndarray, "F nbytes"], ...]
    biases: tuple[Float[np.ndarray, "F r"], ...] | None = None

    @property
    def record_bytes(self) -> int:
        """Bytes of one neuron's record."""
        return self.layout.record_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(layer.nbytes for layer in self.layers)

    def gather(
        self, layer: int, ids: Int[np.ndarray, " n"], *, rows: int | None = None
    ) -> UInt8[np.ndarray, "M nbytes"]:
        """Copy records into a fresh staging buffer.

        Fresh at each call: a transfer may still read the buffer after the caller has moved on.

        Args:
            layer: index of the layer.
            ids: neurons, int32 [n].
            rows: length M of the buffer, at least n; the rows after n are left as they are. None takes n.

        Returns:
            uint8 [M, record bytes].
        """
        staging = aligned_bytes(len(ids) if rows is None else rows, self.record_bytes)
        np.take(self.layers[layer], ids, axis=0, out=staging[: len(ids)], mode="clip")
        return staging


def row_names(config: ModelConfig) -> tuple[str, ...]:
    """Return the canonical names of a record's rows, in order."""
    return ("w_gate", "w_up", "w_down") if config.gated else ("w_up", "w_down")


def record_layout(source: RowSource) -> RecordLayout:
    """Return the layout that keeps a checkpoint's rows as they are.

    Rows keep the file's format where all layers have the same one. Most files hold the down matrix transposed: its
    columns keep their format where each weight stands for itself (float32, float16, bfloat16); where blocks span
    neurons they are kept in float32.
    """
    config = source.config
    *inputs, down = (_common_format(source, name) for name in row_names(config))
    row = inputs[0] if len(set(inputs)) == 1 else "f32"
    return RecordLayout(num_elems=config.d_model, formats=(row,) * len(inputs) + (down,))


def _common_format(source: RowSource, name: str) -> str:
    """Return the format that a matrix has in all layers, or float32 where they differ or have none."""
    layers = range(source.config.num_layers)
    formats = {source.packed_format(f"layers.{layer}.{name}") or "f32" for layer in layers}
    return formats.pop() if len(formats) == 1 else "f32"


def load_store(source: RowSource, *, progress: Callable[[int], None] = lambda layer: None) -> NeuronStore:
    """Read every neuron of a checkpoint into records.

    Args:
        source: an open checkpoint.
        progress: called with the index of each finished layer.

    Returns:
        The store, read-only.
    """
    config, layout = source.config, record_layout(source)
    layers = []
    for layer in range(config.num_layers):
        records = aligned_bytes(config.num_neurons, layout.record_bytes)
        for row, name in enumerate(row_names(config)):
            layout.put(records, row, _rows(source, f"layers.{layer}.{name}", layout.formats[row]))
        records.flags.writeable = False
        layers.append(records)
        source.release()  # else the file's pages stay in memory beside the records: twice the model
        progress(layer)
    biases = None
    if config.ffn_bias:
        names = [f"layers.{layer}.b_up" for layer in range(config.num_layers)]
        biases = tuple(np.ascontiguousarray(source.tensor(name)[:, None]) for name in names)
    return NeuronStore(layout=layout, layers=tuple(layers), biases=biases)


def _rows(source: RowSource, name: str, format: str) -> PackedRows:
    """Return a matrix's rows in the layout's format: the file's own, or float32."""
    packed = source.packed(name)
    if packed is not None and packed.format == format:
        source.check_packed(name)
        return packed
    return PackedRows(data=source.tensor(name).view(np.uint8), format="f32")
