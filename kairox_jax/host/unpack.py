"""Records to float32 matrices, for the products of a whole prompt, on the calling thread alone.

Meanwhile the other cores multiply by what was unpacked before; see ``engine.host_prefill``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt8

from kairox_jax.host import columns, rows
from kairox_jax.host.compile import kernel
from kairox_jax.quant.columns import BLOCK, COLUMN_FORMATS, SharedScales
from kairox_jax.quant.records import RecordLayout

_NONE = np.empty((0, 0), np.float16)


@kernel()
def _unpack_rows(records, at, mark, out):
    for i in range(records.shape[0]):
        rows.unpack(mark, records[i].ctypes.data + at, out[i].ctypes.data, np.int64(out.shape[1]))


@kernel()
def _unpack_columns(records, first, at, mark, scales, minima, out):
    for i in range(records.shape[0]):
        block = (first + i) >> 5
        least = minima[block].ctypes.data if minima.shape[0] > 0 else 0
        columns.unpack_column(
            mark, records[i].ctypes.data + at, scales[block].ctypes.data, least, out[i].ctypes.data,
            np.int64(out.shape[1]),
        )  # fmt: skip


def unpack_neurons(
    records: UInt8[np.ndarray, "F nbytes"],
    layout: RecordLayout,
    scales: SharedScales | None,
    first: int,
    out: Sequence[Float[np.ndarray, "n D"]],
) -> None:
    """Unpack n records from number ``first`` on, to one matrix for each row of a record.

    Args:
        records: one layer's.
        layout: of the records.
        scales: the layer's table, where the down columns share scales.
        first: neuron; a multiple of 32 where they do.
        out: float32 [n, D] each, C-contiguous, overwritten; in the layout's order.

    Raises:
        ValueError: the shapes do not fit together, or a layout with shared scales comes without its table.
    """
    shape = (len(out[0]), layout.num_elems)
    if len(out) != len(layout.formats) or first < 0 or first + shape[0] > len(records):
        raise ValueError(
            f"{len(out)} matrices of neurons {first} to {first + shape[0]} do not fit {len(records)} records of "
            f"{len(layout.formats)} rows"
        )
    if any(o.shape != shape or o.dtype != np.float32 or not o.flags.c_contiguous for o in out):
        raise ValueError(f"out is not {len(out)} contiguous float32 arrays {shape}")
    chosen = records[first : first + shape[0]]
    for name, at, matrix in zip(layout.formats, layout.offsets, out, strict=True):
        mark = rows.MARKS[name]
        if name not in COLUMN_FORMATS:
            _unpack_rows(chosen, at, mark, matrix)
            continue
        if scales is None or first % BLOCK:
            raise ValueError(f"{name} columns need their table of scales, and begin at a multiple of {BLOCK}")
        minima = _NONE if scales.minima is None else scales.minima
        _unpack_columns(
            chosen, first, at, mark, scales.scales.view(np.uint16), minima.view(np.uint16), matrix
        )
