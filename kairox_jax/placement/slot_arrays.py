"""One layer's slot arrays on the device: what they hold, how records are committed, what a slot takes.

"packed" keeps what the file holds: quantised rows as ``BlockRows``, shared-scale columns as codes and the row of
the layer's table, single weights in their own type. "float32" unpacks records when they are committed.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32, UInt8

from kairox_jax.placement.unpack import DENSE_TYPES, as_numbers, unpack_records
from kairox_jax.quant import COLUMN_FORMATS, RecordLayout, SharedScales
from kairox_jax.quant.columns import BLOCK
from pallas_kernels import ColumnRows, Rows, empty_codes, empty_rows
from pallas_kernels.slot_scatter import slot_scatter


class ColumnCodes(NamedTuple):
    """Down columns in slots, without the table that all slots share.

    Attributes:
        codes: see ``pallas_kernels.ColumnRows``.
        blocks: int32 [C], row of the table; 0 for an empty slot.
    """

    codes: Array
    blocks: Int32[Array, " C"]


# Gate, up and down (or up and down) of C slots. Separate arrays: a slice of a stacked one would be copied before
# each product.
SlotArrays = tuple[Rows | ColumnCodes, ...]


def resolve_slot_format(slot_format: str, platform: str) -> str:
    """Return "packed" or "float32"; "auto" is packed on accelerators, float32 on XLA's CPU backend.

    On a CPU there is no device memory to save; which of the two is quicker there was not measured.
    """
    if slot_format != "auto":
        return slot_format
    return "float32" if platform == "cpu" else "packed"


def empty_slots(capacity: int, layout: RecordLayout, slot_format: str) -> SlotArrays:
    """Return one layer's slot arrays, all zero bytes.

    Args:
        capacity: C.
        layout: of the layer's records.
        slot_format: "packed" or "float32".
    """
    return tuple(_empty(capacity, layout.num_elems, name, slot_format) for name in layout.formats)


def _empty(capacity: int, num_elems: int, name: str, slot_format: str) -> Rows | ColumnCodes:
    if slot_format == "float32":
        return jnp.zeros((capacity, num_elems), jnp.float32)
    if name in DENSE_TYPES:
        return jnp.zeros((capacity, num_elems), DENSE_TYPES[name])
    if name in COLUMN_FORMATS:
        codes = empty_codes(capacity, num_elems, COLUMN_FORMATS[name].source)
        return ColumnCodes(codes, jnp.zeros(capacity, jnp.int32))
    return empty_rows(capacity, num_elems, name)


def slot_bytes(layout: RecordLayout, slot_format: str) -> int:
    """Return the bytes that one neuron takes in the slot arrays, the layer's table of scales apart."""
    if slot_format == "float32":
        return len(layout.formats) * layout.num_elems * 4
    return sum(layout.row_bytes) + 4 * layout.shares_scales


def down_rows(slots: SlotArrays, scales: SharedScales | None) -> Rows | ColumnRows:
    """Return the down rows as the device kernels read them: columns with the layer's table."""
    down = slots[-1]
    if not isinstance(down, ColumnCodes):
        return down
    assert scales is not None  # the store has a table wherever the layout asks for one
    minima = None if scales.minima is None else jnp.asarray(scales.minima)
    return ColumnRows(down.codes, down.blocks, jnp.asarray(scales.scales), minima)


@partial(jax.jit, donate_argnames="slots", static_argnames=("layout", "slot_format"))
def commit_records(
    slots: SlotArrays,
    staging: UInt8[Array, "M nbytes"],
    at: Int[Array, " M"],
    neurons: Int[Array, " M"],
    scales: SharedScales | None,
    *,
    layout: RecordLayout,
    slot_format: str,
) -> SlotArrays:
    """Scatter arrived records into their slots, in place: the passed arrays are donated.

    Args:
        slots: one layer's arrays, as ``empty_slots`` makes them.
        staging: packed records [M, record bytes].
        at: slot of each record, int32 [M]; C or more drops the row (padding).
        neurons: whose records these are, int32 [M]; any number inside 0..F-1 for padding.
        scales: the layer's table on the device, where the down columns share scales.
        layout: of the records.
        slot_format: "packed" or "float32".
    """
    if slot_format == "float32":
        dense = unpack_records(staging, layout, scales, neurons)
        return _scatter(slots, jnp.stack(dense, axis=1), at)
    size, start = layout.row_bytes[0], layout.offsets[-1]
    inputs = _staged(staging[:, :start].reshape(len(staging), -1, size), layout.formats[0])
    down, raw = slots[-1], staging[:, start : start + layout.row_bytes[-1]]
    if not isinstance(down, ColumnCodes):
        return _scatter(slots[:-1], inputs, at) + _scatter(
            slots[-1:], _staged(raw[:, None], layout.formats[-1]), at
        )
    flat = jax.lax.bitcast_convert_type(down.codes, jnp.uint8).reshape(len(down.codes), -1)
    (codes,) = _scatter((flat,), raw[:, None], at)
    (blocks,) = _scatter((down.blocks[:, None],), (neurons // BLOCK).astype(jnp.int32)[:, None, None], at)
    assert isinstance(codes, jax.Array) and isinstance(blocks, jax.Array)
    shaped = jax.lax.bitcast_convert_type(codes.reshape(down.codes.shape), down.codes.dtype)
    return *_scatter(slots[:-1], inputs, at), ColumnCodes(shaped, blocks[:, 0])


def _staged(raw: UInt8[Array, "M R nbytes"], name: str) -> Array:
    """Return staged rows as ``slot_scatter`` takes them: numbers, or the bytes of blocks."""
    if name not in DENSE_TYPES:
        return raw
    num_records, num_rows, _ = raw.shape
    return as_numbers(raw.reshape(num_records * num_rows, -1), name).reshape(num_records, num_rows, -1)


def _scatter(slots: tuple, staged: Array, at: Int[Array, " M"]) -> tuple:
    return slot_scatter(slots, staged, at)
