"""The hybrid decode step: residents on the device, the active rest on the host, promotions in the background."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from kairox_jax.balancing import Costs, Policy, Times, initial_residents, share_slots
from kairox_jax.config import ModelConfig
from kairox_jax.engine.dense_part import DeviceDense
from kairox_jax.engine.host_dense import HostDense
from kairox_jax.engine.migrate import Migrator, MoveCounts
from kairox_jax.engine.prefill import Prefill
from kairox_jax.engine.programs import resident_program
from kairox_jax.host import Rule, residual_ffn, thread_count
from kairox_jax.placement import NeuronStore, SlotTable, empty_slots


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """What one step computed where, and how long it took.

    Attributes:
        active: which neurons counted for any of the sequences, bool [L, F].
        share: for how many of them, as a share, float32 [L, F]; None where there was one.
        hits, residual: of these, computed on the device and on the host, int [L].
        times: of the whole step.
        moves: what moved since the step before.
    """

    active: Bool[np.ndarray, "L F"]
    share: Float[np.ndarray, "L F"] | None
    hits: Int[np.ndarray, " L"]
    residual: Int[np.ndarray, " L"]
    times: Times
    moves: MoveCounts


class Hybrid:
    """A model whose neurons live in the host's store and, some of them, in device slots.

    Args:
        store: every neuron's record.
        dense: attention, embedding and output.
        thresholds: activation threshold of each layer, float32 [L].
        policy: decides the moves.
        prior: activation frequencies [L, F], or None.
        slots_per_layer: C.
        slot_format: of the slot arrays, "packed" or "float32".
        max_moves: the most records of one transfer.
        implementation: of the device kernels; see ``pallas_kernels``.
    """

    def __init__(
        self,
        store: NeuronStore,
        dense: DeviceDense | HostDense,
        *,
        config: ModelConfig,
        thresholds: Float[np.ndarray, " L"],
        policy: Policy,
        prior: Float[np.ndarray, "L F"] | None,
        slots_per_layer: int,
        slot_format: str,
        max_moves: int,
        implementation: str,
    ) -> None:
        self.config, self.store, self.dense, self.policy = config, store, dense, policy
        self.thresholds = thresholds
        self.rule = Rule[config.activation.upper()]
        num_layers, num_neurons = config.num_layers, config.num_neurons
        shape = share_slots(policy, slots_per_layer * num_layers, num_layers, num_neurons, prior)
        self.table = SlotTable(num_layers, num_neurons, shape.capacity)
        sizes = zip(shape.capacity.tolist(), store.layouts, strict=True)
        slots = [empty_slots(capacity, layout, slot_format) for capacity, layout in sizes]
        self._scales = [None if table is None else jax.device_put(table) for table in store.scales]
        self.migrator = Migrator(
            store, self.table, slots, scales=self._scales, slot_format=slot_format, max_moves=max_moves
        )
        self.prefill = Prefill(store, dense, thresholds=thresholds, scales=self._scales)
        self.state: Any = policy.init(shape, prior)
        self._resident = resident_program(config.activation, implementation)
        self._shares_cores = isinstance(dense, HostDense)
        self._zero = np.zeros((dense.batch, config.d_model), np.float32)
        self._y_host = [np.empty_like(self._zero) for _ in range(2)]
        self._fired = np.empty((dense.batch, num_neurons), np.uint8)
        self._outside: list[Int[np.ndarray, " n"]] = [np.empty(0, np.int32)] * num_layers
        self._valid: list[Bool[np.ndarray, " C"]] = [np.empty(0, bool)] * num_layers
        self._slot_biases: list[Any] = [None] * num_layers  # on the device, [C, R-1] each where there are any
        for layer, resident in enumerate(initial_residents(policy, shape, prior)):
            self.migrator.fill(layer, np.flatnonzero(resident).astype(np.int32))
            self._refresh(layer)
        self._resident_ms = self._time_residents()
        self._warm_up()

    def step(
        self, ids: Int[np.ndarray, " n"], start: Int[np.ndarray, " n"], rows: Int[np.ndarray, " n"]
    ) -> tuple[Float[np.ndarray, "n V"], StepCounts]:
        """Decode one token of each of n sequences, 1 to B.

        Args:
            ids: the tokens, int32 [n].
            start: their positions, int32 [n].
            rows: each sequence's row of the cache, int32 [n], none twice.

        Returns:
            The logits after them [n, V], overwritten by the next call, and what was computed where.
        """
        logits, masks, users, gpu_ms, cpu_ms = self._forward(ids, start, rows)
        residual = np.count_nonzero(users, axis=1)
        self._add_hits(masks, users)
        moves = self.migrator.take_counts()
        times = Times(gpu_ms, moves.io_ms, cpu_ms)
        active = users > 0
        share = None if len(ids) == 1 else (users / np.float32(len(ids)))
        self._plan_moves(active if share is None else share, times)
        hits = active.sum(axis=1) - residual
        return logits, StepCounts(
            active=active, share=share, hits=hits, residual=residual, times=times, moves=moves
        )

    def _forward(
        self, ids: Int[np.ndarray, " n"], start: Int[np.ndarray, " n"], rows: Int[np.ndarray, " n"]
    ) -> tuple[Float[np.ndarray, "n V"], list[Any], UInt8[np.ndarray, "L F"], float, float]:
        """Run all layers: logits, the residents' masks, for how many the host found each neuron active, ms of both."""
        config = self.config
        x: Any = self.dense.embed(ids[:, None], start)[:, 0]
        zero = self._zero[: len(ids)]
        y_device: Any = zero
        y_host = zero
        masks: list[Any] = []
        users = np.zeros((config.num_layers, config.num_neurons), np.uint8)
        gpu_ms = cpu_ms = 0.0
        for layer in range(config.num_layers):
            if self.migrator.commit_arrived(layer):
                self._refresh(layer)
            begin = perf_counter()
            x, h = self.dense.front(layer, x, y_device, y_host, start, rows)
            y_device, mask = self._launch_residents(layer, h)
            h_host = np.asarray(h)
            ready = perf_counter()
            y_host = self._residual(layer, h_host, users[layer])
            done = perf_counter()
            masks.append(mask)
            cpu_ms += (done - ready) * 1e3
            gpu_ms += (ready - begin) * 1e3 + self._overlapped_ms(layer, mask, (done - ready) * 1e3)
        return self.dense.logits(x, y_device, y_host), masks, users, gpu_ms, cpu_ms

    def _warm_up(self) -> None:
        """Compile what a request runs, so that none of it counts as a request's time."""
        self.prefill_logits(np.zeros(1, np.int32), 0, 0)
        for n in range(1, self.dense.batch + 1):  # writes position 0 of the cache, which a prompt writes anew
            nothing = np.zeros(n, np.int32)
            self._forward(nothing, nothing, np.arange(n, dtype=np.int32))
        self.migrator.warm_up()

    def prefill_logits(self, ids: Int[np.ndarray, " T"], start: int, row: int) -> Float[np.ndarray, " V"]:
        """Run a prompt's tokens from position ``start`` of a row and return the logits after the last one."""
        x, zero = np.asarray(self.prefill(ids, start, row)), self._zero[:1]
        return self.dense.logits(x, zero, zero)[0]

    def copy_row(self, source: int, target: int, end: int) -> None:
        """Copy the first ``end`` positions of one row of the cache to another."""
        self.dense.copy_row(source, target, end)

    @property
    def num_resident(self) -> int:
        """Neurons whose record is on the device, all layers."""
        return sum(int(valid.sum()) for valid in self._valid)

    def settle(self) -> None:
        """Wait for every promotion on the way and commit it (tests, and the end of a run)."""
        for layer in range(self.config.num_layers):
            if self.migrator.commit_arrived(layer, wait=True):
                self._refresh(layer)

    def close(self) -> None:
        """Stop the background worker."""
        self.migrator.close()

    def _launch_residents(self, layer: int, h: Any) -> tuple[Any, Any]:
        """Dispatch the residents' part; it runs while the host computes the residual."""
        if not self._valid[layer].any():
            return self._zero[: len(h)], None
        limit = np.float32(self.thresholds[layer])
        slots, scales, biases = self.migrator.slots[layer], self._scales[layer], self._slot_biases[layer]
        return self._resident(slots, scales, biases, self._valid[layer], limit, h)

    def _residual(
        self, layer: int, h: Float[np.ndarray, "n D"], users: UInt8[np.ndarray, " F"]
    ) -> Float[np.ndarray, "n D"]:
        """Compute the neurons outside the slots, count their users, and add the bias that no neuron owns.

        Two buffers take turns: the device has read the one before when it hands out this layer's input.
        """
        y, outside = self._y_host[layer % 2][: len(h)], self._outside[layer]
        fired = self._fired[: len(h), : len(outside)]
        records, limit = self.store.layers[layer], float(self.thresholds[layer])
        biases = None if self.store.biases is None else self.store.biases[layer]
        # On a CPU device XLA's threads work on the residents at the same time: leave them a core. With 384 of 1536
        # neurons resident a token took 30 ms so, and 36 ms with all cores.
        shared = self._shares_cores and self._valid[layer].any()
        residual_ffn(
            h, records, biases, outside, len(outside), self.rule, limit, y, fired,
            layout=self.store.layouts[layer], scales=self.store.scales[layer],
            num_threads=max(1, thread_count() - 1) if shared else None,
        )  # fmt: skip
        users[outside] = fired[0] if len(h) == 1 else fired.sum(axis=0, dtype=np.uint8)
        if self.dense.down_biases is not None:
            y += self.dense.down_biases[layer]
        return y

    def _overlapped_ms(self, layer: int, mask: Any, host_ms: float) -> float:
        """Return the device time that passed beside the host's, without waiting for the device.

        A device part that is not done yet took all of the host's time, and the rest shows in the next layer's wait;
        one that is done took what it takes alone, measured at the start, and at most the host's time.
        """
        if mask is None:
            return 0.0
        return min(self._resident_ms[layer], host_ms) if mask.is_ready() else host_ms

    def _add_hits(self, masks: list[Any], users: UInt8[np.ndarray, "L F"]) -> None:
        for layer, mask in enumerate(masks):
            if mask is not None:
                counts = np.asarray(mask).sum(axis=0, dtype=np.uint8)
                slots = np.flatnonzero(counts)
                neurons = self.table.neuron_of[layer][slots]
                users[layer, neurons] = counts[slots]
                self.migrator.note_hits(layer, neurons)

    def _plan_moves(self, active: Bool[np.ndarray, "L F"] | Float[np.ndarray, "L F"], times: Times) -> None:
        """Let the policy see the step and send off what it wants moved; nothing here waits.

        A layer's next FFN is about one step away: that is the window in which its transfers can hide.
        """
        window_ms = times.gpu_ms + times.cpu_ms
        cpu_ms_per_record = times.cpu_ms / max(sum(len(outside) for outside in self._outside), 1)
        for layer in range(self.config.num_layers):
            costs = Costs(
                max_moves=self.migrator.room(layer),
                free_slots=self.table.free(layer),
                gpu_ms_per_record=self._resident_ms[layer] / max(int(self.table.capacity[layer]), 1),
                cpu_ms_per_record=cpu_ms_per_record,
                link_ms_per_record=self.migrator.ms_per_record,
                window_ms=window_ms,
                record_bytes=self.store.record_bytes(layer),
            )
            held = self.table.held(layer)
            self.state, plan = self.policy.plan(self.state, layer, active[layer], held, costs)
            self.migrator.submit(layer, plan)
            if len(plan.evict):
                self._refresh(layer)
        self.state = self.policy.feedback(self.state, None, times)

    def _refresh(self, layer: int) -> None:
        """Renew what the step reads of the slot table."""
        self._outside[layer] = np.flatnonzero(~self.table.resident(layer)).astype(np.int32)
        self._valid[layer] = self.table.occupied(layer)
        if self.store.biases is not None:
            # A fresh array, by the neurons' places; what an empty slot gets is masked.
            self._slot_biases[layer] = jax.device_put(self.store.biases[layer][self.table.neuron_of[layer]])

    def _time_residents(self) -> Float[np.ndarray, " L"]:
        """Return the median time of each layer's device part alone, in ms, after compiling it.

        Layers with the same number of slots take the same time: each number is measured once.
        """
        measured: dict[int, float] = {0: 0.0}
        for layer, slots in enumerate(self.table.capacity.tolist()):
            if slots not in measured:
                measured[slots] = self._time_layer(layer, slots)
        return np.array([measured[slots] for slots in self.table.capacity.tolist()])

    def _time_layer(self, layer: int, slots: int) -> float:
        times, every = [], np.ones(slots, bool)
        for _ in range(4):
            begin = perf_counter()
            y, _ = self._resident(
                self.migrator.slots[layer],
                self._scales[layer],
                self._slot_biases[layer],
                every,
                np.float32(self.thresholds[layer]),
                self._zero[:1],
            )
            y.block_until_ready()
            times.append((perf_counter() - begin) * 1e3)
        return float(np.median(times[1:]))
