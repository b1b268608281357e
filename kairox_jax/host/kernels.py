"""Host kernels: the FFN of chosen neurons, at the speed of memory, and of all of them for a prompt.

Sums are made per chunk of neurons, and the chunks depend on the number of neurons alone: the result has the
same bits for any number of threads. One caller at a time; others wait.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int32, UInt8

from kairox_jax.host import decode, loops, prompt, rows, threads
from kairox_jax.host.calls import (
    COUNTERS,
    MAX_BATCH,
    SERIAL_BYTES,
    aligned,
    check_floats,
    checked,
    chunk_of,
    read_only,
    room_for,
)
from kairox_jax.host.rules import GATED_ONLY, Rule
from kairox_jax.host.tiles import TOKENS
from kairox_jax.quant.columns import BLOCK, COLUMN_FORMATS, SharedScales, padded_columns
from kairox_jax.quant.records import RecordLayout

_NO_TABLE = read_only(np.empty((0, 0), np.uint16))


def _record_layout(
    records: np.ndarray, num: int, layout: RecordLayout | None
) -> tuple[np.ndarray, RecordLayout]:
    """Return the records as bytes [F, record bytes], and their layout."""
    if not records.flags.c_contiguous:
        raise ValueError("records are not C-contiguous: one neuron must be one run of bytes")
    if layout is None:
        if records.dtype != np.float32 or records.ndim != 3 or records.shape[2] != num:
            raise ValueError(
                f"records are {records.dtype} {records.shape}: expected float32 [F, R, {num}], or bytes with a layout"
            )
        layout = RecordLayout(num_elems=num, formats=("f32",) * records.shape[1], alignment=1)
        return records.reshape(records.shape[0], -1).view(np.uint8), layout
    if records.dtype != np.uint8 or records.ndim != 2 or records.shape[1] != layout.record_bytes:
        raise ValueError(
            f"records are {records.dtype} {records.shape}: this layout needs uint8 [F, {layout.record_bytes}]"
        )
    if layout.num_elems != num:
        raise ValueError(f"records of {layout.num_elems} weights a row do not fit x of {num}")
    return records, layout


class LayerFfn:
    """The FFN of one layer, checked once, so that a step spends its time on the sums.

    Args:
        records: one layer's neurons: uint8 [F, bytes] as ``layout`` says, or float32 [F, R, D] without one.
            R = 3: gate row, up row, down column; R = 2: up row, down column.
        biases: float32 [F, R-1] (gate and up, or up), or None.
        rule: activation.
        threshold: of SILU (on |z|) and FATRELU (on the gate); other rules take no notice.
        num: D.
        layout: formats and places of a record's rows.
        scales: the layer's table, where the layout's down columns share scales; ids in ascending order are then
            fastest, because a block's scales are read once.
        activations: one of ``HOST_ACTIVATIONS``. With "int8" x is rounded for the products with gate and up rows in
            q8_0, q4_0 and q4_1 (``host.integers``). Other rows, and the down sums, take floats as they are.

    Attributes:
        rows: what the loops take of gate and up rows: records, whether they are gated, and the rows' mark.
        down: the same of down columns: their mark, bytes of a row before them, biases, scales and minima.
        rule: number of the rule, and threshold.

    Raises:
        ValueError: shapes, types or the rule do not fit together.
    """

    def __init__(
        self,
        records: Float[np.ndarray, "F R D"] | UInt8[np.ndarray, "F nbytes"],
        biases: Float[np.ndarray, "F r"] | None,
        rule: Rule,
        threshold: float,
        *,
        num: int,
        layout: RecordLayout | None = None,
        scales: SharedScales | None = None,
        activations: str = "float32",
    ) -> None:
        raw, layout = _record_layout(records, num, layout)
        num_rows = len(layout.formats)
        if biases is None:
            biases = np.empty((0, 0), np.float32)
        else:
            check_floats("biases", biases, (raw.shape[0], num_rows - 1))
        if num_rows == 2 and rule.name.lower() in GATED_ONLY:
            raise ValueError(f"rule {rule.name} needs a gate row, but the records hold two rows")
        self.num, self.record_bytes, self._padded = num, raw.shape[1], padded_columns(num)
        self._mark = rows.mark_of(layout.formats[0], checked(activations))
        self.rows = read_only(raw), num_rows == 3, self._mark
        self.down = (
            rows.MARKS[layout.formats[-1]], layout.row_bytes[0], read_only(biases),
            *_scale_tables(scales, layout, raw.shape[0]),
        )  # fmt: skip
        self.rule = int(rule), np.float32(threshold)
        self._column = layout.offsets[-1], decode.block_bytes(layout.formats[-1])
        self._row_mark = rows.MARKS[layout.formats[0]]

    def __call__(
        self,
        x: Float[np.ndarray, "B D"],
        ids: Int32[np.ndarray, " capacity"],
        n: int,
        out: Float[np.ndarray, "B D"],
        active: UInt8[np.ndarray, "B capacity"],
        *,
        num_threads: int | None = None,
    ) -> None:
        """Compute what the chosen neurons add to the FFN's output; arguments as for ``residual_ffn``."""
        check_floats("x", x, (None, self.num))
        batch = len(x)
        check_floats("out", out, x.shape, written=True)
        if not 1 <= batch <= MAX_BATCH:
            raise ValueError(f"x holds {batch} tokens: expected 1 to {MAX_BATCH}; split larger batches")
        if ids.dtype != np.int32 or ids.ndim != 1 or not 0 <= n <= ids.shape[0] or not ids.flags.c_contiguous:
            raise ValueError(
                f"ids are {ids.dtype} {ids.shape} with n {n}: expected contiguous int32 of at least n"
            )
        if active.dtype != np.uint8 or active.ndim != 2 or active.shape[0] != batch or active.shape[1] < n:
            raise ValueError(
                f"active is {active.dtype} {active.shape}: expected uint8 [{batch}, at least {n}]"
            )
        if not active.flags.writeable:
            raise ValueError("active cannot be written: give an array that is not read-only")
        width, chunk = rows.width_of(batch), chunk_of(n)
        with threads.own(1 if n * self.record_bytes < SERIAL_BYTES else num_threads) as helpers:
            slots = np.empty(-(-n // chunk), np.int64)
            partials = aligned("partial", helpers * slots.size, len(width), self._padded)
            inputs = aligned("inputs", rows.prepared_floats(self.num, len(width)))
            loops.ffn(
                read_only(x), inputs, *self.rows, width, *self.down, ids[:n],
                chunk, *self.rule, partials, slots, out, active, COUNTERS, helpers,
            )  # fmt: skip

    def add_all(self, h: Float[np.ndarray, "T D"], x: Float[np.ndarray, "T D"]) -> None:
        """Add the whole FFN of many tokens, as a prompt has them, to the residual stream; activations are not rounded.

        Args:
            h: float32 [T, D], normalised FFN inputs.
            x: float32 [T, D], the residual stream, changed in place. The result does not depend on the threads.

        Raises:
            ValueError: shapes or types do not fit.
        """
        check_floats("h", h, (None, self.num))
        check_floats("x", x, h.shape, written=True)
        raw, gated, _ = self.rows
        down_mark, row_bytes, *tables = self.down
        with threads.own() as helpers:
            tokens = room_for(*h.shape)
            zs = aligned("values", len(tokens), -(-len(raw) // BLOCK) * BLOCK * TOKENS)
            prompt.ffn(
                read_only(h), tokens, self.num, raw, gated, self._row_mark, down_mark, row_bytes, *self._column,
                *tables, *self.rule, zs, x, COUNTERS, helpers,
            )  # fmt: skip


def residual_ffn(
    x: Float[np.ndarray, "B D"],
    records: Float[np.ndarray, "F R D"] | UInt8[np.ndarray, "F nbytes"],
    biases: Float[np.ndarray, "F r"] | None,
    ids: Int32[np.ndarray, " capacity"],
    n: int,
    rule: Rule,
    threshold: float,
    out: Float[np.ndarray, "B D"],
    active: UInt8[np.ndarray, "B capacity"],
    *,
    layout: RecordLayout | None = None,
    scales: SharedScales | None = None,
    num_threads: int | None = None,
    activations: str = "float32",
) -> None:
    """Compute what the chosen neurons of one layer add to the FFN's output, with a ``LayerFfn`` made for this call.

    Args:
        x: float32 [B, D], normalised FFN inputs, B 1 to 8.
        records, biases, rule, threshold, layout, scales, activations: as for ``LayerFfn``.
        ids: int32; the first n are evaluated, each in [0, F) (not checked) and at most once.
        n: how many of ids count.
        out: float32 [B, D], overwritten with the sum of z times the down column over active neurons.
        active: uint8 [B, >= n]; [b, k] becomes 1 where neuron ids[k] is active for token b, else 0.
        num_threads: threads to use; None takes all. The result does not depend on it.

    Raises:
        ValueError: shapes, types or the rule do not fit together.
    """
    check_floats("x", x, (None, None))
    ffn = LayerFfn(
        records, biases, rule, threshold, num=x.shape[1], layout=layout, scales=scales, activations=activations
    )  # fmt: skip
    ffn(x, ids, n, out, active, num_threads=num_threads)


def _scale_tables(
    scales: SharedScales | None, layout: RecordLayout, num_neurons: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bits of scales and minima, empty where the layout has none."""
    if scales is None and not layout.shares_scales:
        return _NO_TABLE, _NO_TABLE
    if scales is None or not layout.shares_scales:
        raise ValueError(
            f"{layout.formats[-1]} down columns with{'out' if scales is None else ''} a table of scales: "
            "pass the store's layout and scales of one layer together"
        )
    column = COLUMN_FORMATS[layout.formats[-1]]
    shape = (num_neurons // BLOCK, padded_columns(layout.num_elems))
    tables = (scales.scales, scales.minima) if column.has_minima else (scales.scales,)
    for table in tables:
        found = None if table is None else (table.dtype, table.shape, table.flags.c_contiguous)
        if found != (np.float16, shape, True):
            raise ValueError(f"{column.name} scales are {found}: expected contiguous float16 {shape}")
    views = [read_only(table.view(np.uint16)) for table in tables if table is not None]
    return views[0], views[-1] if column.has_minima else _NO_TABLE
