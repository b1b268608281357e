"""Promotions in the background: gather, transfer, and commit once arrived. Nothing waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import jax
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from kairox_jax.balancing import Plan
from kairox_jax.engine.link import Link, LinkCost
from kairox_jax.placement import NeuronStore, SlotArrays, SlotTable, commit_records
from kairox_jax.quant import SharedScales

SHORT_BUFFERS = (8, 16, 32, 64, 128)  # rows; the longest has room for max_moves
MAX_IN_FLIGHT = 2  # transfers of one layer; a third would only arrive later


@dataclass(frozen=True)
class Sent:
    """What one plan loaded, in one buffer or several: how many rows of each are records, and the link's time."""

    buffers: list[UInt8[Array, "M nbytes"]]
    counts: list[int]
    io_ms: float


@dataclass(frozen=True)
class Arrival:
    """A transfer that has been sent off."""

    neurons: Int[np.ndarray, " n"]
    slots: Int[np.ndarray, " n"]
    transfer: Future[Sent]


@dataclass
class MoveCounts:
    """What moved since the last reset."""

    promotions: int = 0
    evictions: int = 0
    wasted_promotions: int = 0
    link_bytes: int = 0
    io_ms: float = 0.0


class Migrator:
    """Carries out plans: evictions at once, promotions by a worker thread.

    The worker gathers the records into a fresh buffer and sends it over the link, which waits for its arrival and
    times it. The caller's thread commits what has arrived, between two uses of a layer's slots.
    Buffers have one of a few lengths, so that few shapes are compiled; padding rows go to slot C and are dropped. A
    plan that would need much padding goes in several.

    Args:
        store: the host's records.
        table: who holds which slot; shared with the caller.
        slots: one entry of slot arrays a layer; replaced in place at each commit.
        scales: the store's tables, on the device.
        slot_format: of the slot arrays, "packed" or "float32".
        max_moves: the most records of one transfer.
        link: carries them; the machine's own where not given.
    """

    def __init__(
        self,
        store: NeuronStore,
        table: SlotTable,
        slots: list[SlotArrays],
        *,
        scales: Sequence[SharedScales | None],
        slot_format: str,
        max_moves: int,
        link: Link | None = None,
    ) -> None:
        self.store, self.table, self.slots, self.max_moves = store, table, slots, max_moves
        self.scales, self.slot_format = scales, slot_format
        self.link = Link() if link is None else link
        self.counts = MoveCounts()
        self.cost = LinkCost(())  # without a cost until the warm-up
        self.commit_ms = 0.0  # of a few records, alone; measured by the warm-up
        self._lengths = sorted({min(length, max_moves) for length in (*SHORT_BUFFERS, max_moves)})
        self._pending: list[deque[Arrival]] = [deque() for _ in store.layers]
        self._unused = np.zeros_like(table.reserved)
        # Records and transfers; each array is written by one thread.
        self._submitted, self._sent = np.zeros(2, np.int64), np.zeros(2, np.int64)
        self._layer_ms = np.zeros(len(store.layers))
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kairox-link")

    def warm_up(self) -> None:
        """Compile the commit of each buffer length, with rows that are all dropped, and time commit and link."""
        kinds = zip(self.table.capacity.tolist(), self.store.layouts, strict=True)
        first = {kind: layer for layer, kind in reversed(list(enumerate(kinds)))}
        for (capacity, _), layer in first.items():
            for length in self._lengths if capacity else ():
                records = jax.device_put(self.store.gather(layer, np.zeros(length, np.int32)))
                at = np.full(length, capacity, np.int32)
                self._commit(layer, records, at, np.zeros(length, np.int32))
        if first:
            self.commit_ms = self._time_commit(max(first.values(), key=self.table.capacity.__getitem__))
            lengths, layer = sorted({self._lengths[0], self._lengths[-1]}), next(iter(first.values()))
            # Both sizes are sent twice: what a first time adds is not the link's.
            sent = [(n, self._send(layer, np.zeros(n, np.int32)).io_ms) for n in (*lengths, *lengths)]
            self.cost = LinkCost(sent[len(lengths) :])

    def _time_commit(self, layer: int, *, repeats: int = 5, in_a_row: int = 4) -> float:
        """Return the median time of a commit of the shortest buffer, in ms; 0 without slots.

        Some are dispatched in a row, as a step does between its other programs: the way to the device and back is
        not a commit's own.
        """
        capacity = int(self.table.capacity[layer])
        if not capacity:
            return 0.0
        length, times = self._lengths[0], []
        nobody, at = np.zeros(length, np.int32), np.full(length, capacity, np.int32)
        records = jax.device_put(self.store.gather(layer, nobody)).block_until_ready()
        for _ in range(repeats):
            jax.block_until_ready(self.slots[layer])
            begin = perf_counter()
            for _ in range(in_a_row):
                self._commit(layer, records, at, nobody)
            jax.block_until_ready(self.slots[layer])
            times.append((perf_counter() - begin) * 1e3 / in_a_row)
        return float(np.median(times))

    def room(self, layer: int) -> int:
        """Return how many records a plan for this layer may load now."""
        return self.max_moves if len(self._pending[layer]) < MAX_IN_FLIGHT else 0

    @property
    def backlog_ms(self) -> float:
        """Return about how long the link still needs for what was sent off."""
        records, transfers = (self._submitted - self._sent).tolist()
        return records * self.cost.ms_per_record + transfers * self.cost.fixed_ms

    def submit(self, layer: int, plan: Plan) -> None:
        """Evict at once and send the loads off."""
        if len(plan.evict):
            self.table.evict(layer, plan.evict)
            self.counts.evictions += len(plan.evict)
            self.counts.wasted_promotions += int(self._unused[layer, plan.evict].sum())
            self._unused[layer, plan.evict] = False
        if len(plan.load):
            reserved = self.table.reserve(layer, plan.load)
            transfer = self._worker.submit(self._work, layer, plan.load)
            self._submitted += (len(plan.load), 1)
            self._pending[layer].append(Arrival(plan.load, reserved, transfer))

    def commit_arrived(self, layer: int, *, wait: bool = False) -> bool:
        """Scatter the records that have arrived into their slots.

        Args:
            layer: index of the layer.
            wait: wait for everything on the way (tests, loading); a step never does.

        Returns:
            Whether the layer's residents changed.

        Raises:
            Exception: what made a transfer fail.
        """
        pending, changed = self._pending[layer], False
        while pending and (wait or pending[0].transfer.done()):
            arrival = pending.popleft()
            try:
                sent = arrival.transfer.result()
            except Exception:
                lost = self.table.slot_of[layer, arrival.neurons] == arrival.slots
                self.table.evict(layer, arrival.neurons[lost])
                raise
            kept = self.table.commit(layer, arrival.neurons, arrival.slots)
            places, begin = np.where(kept, arrival.slots, self.table.capacity[layer]), 0
            for records, count in zip(sent.buffers, sent.counts, strict=True):
                at = np.full(records.shape[0], self.table.capacity[layer], np.int32)
                at[:count] = places[begin : begin + count]
                self._commit(layer, records, at, arrival.neurons[begin : begin + count])
                begin += count
            self._unused[layer, arrival.neurons[kept]] = True
            self.counts.promotions += len(kept)
            self.counts.wasted_promotions += int(np.count_nonzero(~kept))
            self.counts.link_bytes += len(kept) * self.store.record_bytes(layer)
            self.counts.io_ms += sent.io_ms
            self._layer_ms[layer] += sent.io_ms
            self.cost.add(len(kept), sent.io_ms)
            changed = True
        return changed

    def note_hits(self, layer: int, neurons: Int[np.ndarray, " n"]) -> None:
        """Remember that promoted neurons were of use."""
        self._unused[layer, neurons] = False

    def fill(self, layer: int, neurons: Int[np.ndarray, " n"]) -> None:
        """Load a layer's first residents and wait for them; not counted as promotions."""
        if not len(neurons):
            return
        reserved = self.table.reserve(layer, neurons)
        records = jax.device_put(self.store.gather(layer, neurons))
        self._commit(layer, records, reserved, neurons)
        self.table.commit(layer, neurons, reserved)

    def take_counts(self) -> MoveCounts:
        """Return what moved since the last call."""
        counts, self.counts = self.counts, MoveCounts()
        return counts

    def take_layer_ms(self) -> Float[np.ndarray, " L"]:
        """Return the link time of each layer's arrivals since the last call, in ms."""
        taken, self._layer_ms = self._layer_ms, np.zeros_like(self._layer_ms)
        return taken

    def close(self) -> None:
        """Stop the worker; a transfer on the way is finished, or abandoned by the link, and none is begun."""
        self.link.close()
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _commit(
        self,
        layer: int,
        records: UInt8[Array, "M nbytes"],
        at: Int[np.ndarray, " M"],
        neurons: Int[np.ndarray, " n"],
    ) -> None:
        """Scatter records into the layer's slot arrays; the rows after ``neurons`` are padding."""
        whose = np.zeros(len(at), np.int32)
        whose[: len(neurons)] = neurons
        self.slots[layer] = commit_records(
            self.slots[layer],
            records,
            at,
            whose,
            self.scales[layer],
            layout=self.store.layouts[layer],
            slot_format=self.slot_format,
        )

    def _work(self, layer: int, neurons: Int[np.ndarray, " n"]) -> Sent:
        try:
            return self._send(layer, neurons)
        finally:
            self._sent += (len(neurons), 1)

    def _send(self, layer: int, neurons: Int[np.ndarray, " n"]) -> Sent:
        sent, begin = Sent([], [], 0.0), 0
        for rows in buffer_lengths(len(neurons), self._lengths):
            part = neurons[begin : begin + rows]
            records, ms = self.link.send(partial(self.store.gather, layer, part, rows=rows))
            begin += len(part)
            sent = Sent([*sent.buffers, records], [*sent.counts, len(part)], sent.io_ms + ms)
        return sent


def buffer_lengths(records: int, lengths: Sequence[int]) -> list[int]:
    """Return the buffers that carry so many records, from an ascending choice of lengths.

    One with little padding where there is one (an eighth, or less than the shortest buffer), else the longest that
    will be full, and so on: padding rows take the link's time as well.

    Args:
        records: at most the last of the lengths.
        lengths: rows.
    """
    chosen, left = [], records
    while left > 0:
        fits = next(length for length in lengths if length >= left)
        if fits - left < max(lengths[0], records // 8):
            return [*chosen, fits]
        chosen.append(max(length for length in lengths if length <= left))
        left -= chosen[-1]
    return chosen
