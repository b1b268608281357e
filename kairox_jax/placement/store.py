"""The neuron store: every FFN neuron's record in host memory, contiguous, and its gathering into staging."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Float, Int, UInt8

from kairox_jax.config import ModelConfig
from kairox_jax.placement.arena import Arena, aligned_bytes
from kairox_jax.quant import (
    PackedRows,
    RecordLayout,
    SharedScales,
    column_format,
    split_columns,
    transpose_rows,
)


class RowSource(Protocol):
    """What the store needs of a checkpoint."""

    @property
    def config(self) -> ModelConfig:
        """The model's facts."""
        ...

    def tensor(self, name: str) -> np.ndarray:
        """Return a fresh float32 array by canonical name."""
        ...

    def packed(self, name: str, *, transposed: bool = False) -> PackedRows | None:
        """Return a matrix in the file's own rows, or None where the file keeps it in the other direction."""
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


@dataclass(frozen=True, kw_only=True)
class NeuronStore:
    """Records of all layers, in the file's own formats.

    Attributes:
        layouts: one a layer: formats and places of a record's rows.
        layers: one array a layer, uint8 [F, record bytes]: gate row, up row and down column of a neuron.
        scales: one table a layer where its down columns share scales, else None.
        biases: one array a layer, float32 [F, R-1], or None for a model without.
    """

    layouts: tuple[RecordLayout, ...]
    layers: tuple[UInt8[np.ndarray, "F nbytes"], ...]
    scales: tuple[SharedScales | None, ...]
    biases: tuple[Float[np.ndarray, "F r"], ...] | None = None

    def record_bytes(self, layer: int) -> int:
        """Return the bytes of one neuron's record."""
        return self.layouts[layer].record_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all records and tables."""
        tables = sum(table.nbytes for table in self.scales if table is not None)
        return sum(layer.nbytes for layer in self.layers) + tables

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
        staging = aligned_bytes(len(ids) if rows is None else rows, self.record_bytes(layer))
        np.take(self.layers[layer], ids, axis=0, out=staging[: len(ids)], mode="clip")
        return staging


def row_names(config: ModelConfig) -> tuple[str, ...]:
    """Return the canonical names of a record's rows, in order."""
    return ("w_gate", "w_up", "w_down") if config.gated else ("w_up", "w_down")


def record_layouts(source: RowSource) -> tuple[RecordLayout, ...]:
    """Return the layout of each layer that keeps a checkpoint's weights as they are.

    Gate and up rows keep the file's format where the two agree. A down matrix that the file keeps by output in
    blocks becomes shared-scale columns, one of single weights is transposed in its own type. What the kernels do
    not read, such as K-quants, becomes float32.
    """
    return tuple(_layout(source, layer) for layer in range(source.config.num_layers))


def _layout(source: RowSource, layer: int) -> RecordLayout:
    config = source.config
    *inputs, down = (f"layers.{layer}.{name}" for name in row_names(config))
    formats = {source.packed_format(name) or "f32" for name in inputs}
    row = formats.pop() if len(formats) == 1 else "f32"
    return RecordLayout(
        num_elems=config.d_model, formats=(row,) * len(inputs) + (_down_format(source, down),)
    )


def _down_format(source: RowSource, name: str) -> str:
    by_output = source.packed(name, transposed=True)
    if by_output is None:
        return source.packed_format(name) or "f32"
    return column_format(by_output.format) or by_output.format


def load_store(
    source: RowSource,
    *,
    progress: Callable[[int], None] = lambda layer: None,
    arena: Arena | None = None,
) -> NeuronStore:
    """Read every neuron of a checkpoint into records; beside them, one matrix at a time is in memory.

    Args:
        source: an open checkpoint.
        progress: called with the index of each finished layer.
        arena: for the records; one of its own where not given.

    Returns:
        The store, read-only.
    """
    config, layouts = source.config, record_layouts(source)
    layers, scales, arena = [], [], Arena() if arena is None else arena
    for layer, layout in enumerate(layouts):
        records = arena.take(config.num_neurons, layout.record_bytes)
        *inputs, down = (f"layers.{layer}.{name}" for name in row_names(config))
        for row, name in enumerate(inputs):
            layout.put(records, row, _rows(source, name, layout.formats[row]))
        scales.append(_put_down(source, down, layout, records, arena))
        records.flags.writeable = False
        layers.append(records)
        source.release()  # else the file's pages stay in memory beside the records: twice the model
        progress(layer)
    biases = None
    if config.ffn_bias:
        names = [f"layers.{layer}.b_up" for layer in range(config.num_layers)]
        biases = tuple(np.ascontiguousarray(source.tensor(name)[:, None]) for name in names)
    return NeuronStore(layouts=layouts, layers=tuple(layers), scales=tuple(scales), biases=biases)


def _put_down(
    source: RowSource, name: str, layout: RecordLayout, records: UInt8[np.ndarray, "F nbytes"], arena: Arena
) -> SharedScales | None:
    """Write the down columns of a layer, and return the scales that they share."""
    row = len(layout.formats) - 1
    by_output = source.packed(name, transposed=True)
    if by_output is None:
        layout.put(records, row, _rows(source, name, layout.formats[row]))
        return None
    source.check_packed(name)
    if layout.shares_scales:
        codes, scales = split_columns(by_output)
        layout.put_bytes(records, row, codes)
        minima = None if scales.minima is None else arena.keep(scales.minima)
        return SharedScales(arena.keep(scales.scales), minima)
    at = layout.offsets[row]
    transpose_rows(by_output, records[:, at : at + layout.row_bytes[row]])
    return None


def _rows(source: RowSource, name: str, format: str) -> PackedRows:
    """Return a matrix's rows in the layout's format: the file's own, or float32."""
    packed = source.packed(name)
    if packed is not None and packed.format == format:
        source.check_packed(name)
        return packed
    return PackedRows(data=source.tensor(name).view(np.uint8), format="f32")
