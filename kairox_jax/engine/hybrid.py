"""The hybrid decode step: residents on the device, the active rest on the host, promotions in the background."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from kairox_jax.balancing import Policy, Times, initial_residents, share_slots
from kairox_jax.config import ModelConfig
from kairox_jax.engine.counts import Pass, StepCounts
from kairox_jax.engine.dense_part import DeviceDense
from kairox_jax.engine.forecast import Forecast, Forecasted
from kairox_jax.engine.host_dense import HostDense
from kairox_jax.engine.host_prefill import HostPrefill
from kairox_jax.engine.link import Link
from kairox_jax.engine.meter import Meter, time_residents
from kairox_jax.engine.migrate import Migrator
from kairox_jax.engine.prefill import DevicePrefill, Piece, Prefill
from kairox_jax.engine.programs import resident_program
from kairox_jax.engine.whole_step import WholeStep, whole_step
from kairox_jax.host import LayerFfn, Rule, thread_count
from kairox_jax.placement import NeuronStore, SlotTable, empty_slots


def _merged(x: Any, y_device: Any, y_host: Any) -> Any:
    """Return what enters a layer. On the host at once: its ``x`` is updated in place while JAX would still read it."""
    return x + (np.asarray(y_device) if isinstance(x, np.ndarray) else y_device) + y_host


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
        forecast: which neurons to compute (``predicted`` mode); None computes every gate (``exact``).
        link: carries promotions; the machine's own where not given.
        host_activations: of the host's kernels, one of ``HOST_ACTIVATIONS``.
    """

    _whole: WholeStep | None = None  # runs all layers in one call, where that is possible

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
        forecast: Forecast | None = None,
        link: Link | None = None,
        host_activations: str = "float32",
    ) -> None:
        self.config, self.store, self.dense, self.policy = config, store, dense, policy
        self.thresholds, self.forecast = thresholds, forecast
        reads = None if forecast is None else forecast.predictors.input
        self._ahead, self._wants_input = reads == "adjacent", reads == "layer_input"
        self._ffns = [
            LayerFfn(
                store.layers[layer], None if store.biases is None else store.biases[layer],
                Rule.of(config.activation), float(thresholds[layer]), num=config.d_model,
                layout=store.layouts[layer], scales=store.scales[layer], activations=host_activations,
            )
            for layer in range(config.num_layers)
        ]  # fmt: skip
        num_layers, num_neurons = config.num_layers, config.num_neurons
        shape = share_slots(policy, slots_per_layer * num_layers, num_layers, num_neurons, prior)
        self.table = SlotTable(num_layers, num_neurons, shape.capacity)
        self._has_slots = bool(self.table.capacity.any())
        sizes = zip(shape.capacity.tolist(), store.layouts, strict=True)
        slots = [empty_slots(capacity, layout, slot_format) for capacity, layout in sizes]
        self._scales = [None if table is None else jax.device_put(table) for table in store.scales]
        self.migrator = Migrator(
            store, self.table, slots,
            scales=self._scales, slot_format=slot_format, max_moves=max_moves, link=link,
        )  # fmt: skip
        self.prefill: Prefill = (
            HostPrefill(dense, ffns=self._ffns)
            if isinstance(dense, HostDense)
            else DevicePrefill(store, dense, thresholds=thresholds, scales=self._scales)
        )
        self._shares_cores = isinstance(dense, HostDense)
        self._whole = None if self._has_slots else whole_step(dense, self._ffns, forecast)
        drops = config.activation == "fatrelu" and bool((thresholds > 0).any())
        self._wants_pieces = forecast is not None or drops or host_activations != "float32"
        self.state: Any = policy.init(shape, prior)
        self._resident = resident_program(config.activation, implementation)
        self._zero = np.zeros((dense.batch, config.d_model), np.float32)
        self._y_host = [np.empty_like(self._zero) for _ in range(2)]
        self._fired = np.empty(dense.batch * num_neurons, np.uint8)
        self._outside: list[Int[np.ndarray, " n"]] = [np.empty(0, np.int32)] * num_layers
        self._valid: list[Bool[np.ndarray, " C"]] = [np.empty(0, bool)] * num_layers
        self._slot_biases: list[Any] = [None] * num_layers  # on the device, [C, R-1] each where there are any
        for layer, resident in enumerate(initial_residents(policy, shape, prior)):
            self.migrator.fill(layer, np.flatnonzero(resident).astype(np.int32))
            self._refresh(layer)
        alone_ms = time_residents(self._run_alone, self.table.capacity)
        self.meter = Meter(alone_ms, shares_cores=self._shares_cores)
        self._is_warm = False  # what warms up is no text: no policy sees it
        self._warm_up()
        self._is_warm = True

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
        run = self._forward(ids, start, rows)
        users = run.users
        residual = np.count_nonzero(users, axis=1)
        self._add_hits(run.masks, users)
        moves = self.migrator.take_counts()
        by_layer, times = self.meter.end_step(run, residual, self.migrator.take_layer_ms())
        active = users > 0
        share = None if len(ids) == 1 else (users / np.float32(len(ids)))
        self._feed_back(by_layer, times)
        seen = active if share is None else share
        # A forecast of the next layer has planned all but the first; what the first will need is known least late now.
        for layer in range(1 if self._ahead else self.config.num_layers):
            self._plan(layer, seen[layer])
        counts = StepCounts(
            active=active,
            share=share,
            predicted=None if self.forecast is None else run.predicted / len(ids),
            hits=active.sum(axis=1) - residual,
            residual=residual,
            times=times,
            moves=moves,
        )
        return run.logits, counts

    def _forward(
        self, ids: Int[np.ndarray, " n"], start: Int[np.ndarray, " n"], rows: Int[np.ndarray, " n"]
    ) -> Pass:
        """Run all layers and merge them into logits."""
        if self._whole is not None:
            return self._whole(ids, start, rows)
        config, n = self.config, len(ids)
        x: Any = self.dense.embed(ids[:, None], start)[:, 0]
        y_device: Any = self._zero[:n]
        y_host = self._zero[:n]
        run = Pass(users=np.zeros((config.num_layers, config.num_neurons), np.uint8))
        following: Forecasted | None = None
        for layer in range(config.num_layers):
            if self.migrator.commit_arrived(layer):
                self._refresh(layer)
            begin = perf_counter()
            entering = _merged(x, y_device, y_host) if self._wants_input else None
            x, h = self.dense.front(layer, x, y_device, y_host, start, rows)
            here, following = self._forecast(layer, following, x if entering is None else entering)
            chosen = None if here is None else here.chosen
            if chosen is not None:
                run.predicted += int(np.count_nonzero(chosen))
            y_device, mask = self._launch_residents(layer, h, chosen)
            h_host = np.asarray(h)
            ready = perf_counter()
            if following is not None:  # transfers for the next layer start before this one's residual
                following = following.on_host()
                if self._is_warm and self._has_slots:
                    assert chosen is not None
                    beside = int(np.count_nonzero(chosen[:, self._outside[layer]]))
                    self._plan(layer + 1, following.share(), beside=beside)
            y_host = self._residual(layer, h_host, here, run)
            done = perf_counter()
            run.masks.append(mask)
            run.cpu_ms.append((done - ready) * 1e3)
            overlapped = self.meter.overlapped_ms(layer, mask, (done - ready) * 1e3)
            run.gpu_ms.append((ready - begin) * 1e3 + overlapped)
        run.logits = self.dense.logits(x, y_device, y_host)
        return run

    def _forecast(
        self, layer: int, following: Forecasted | None, x: Any
    ) -> tuple[Forecasted | None, Forecasted | None]:
        """Return what is forecast for this layer, on the host, and for the next one.

        Args:
            layer: index of the layer, whose attention is done.
            following: what the layer before forecast for this one, on the host, or None.
            x: the predictors' input [n, D].
        """
        if self.forecast is None:
            return None, None
        ahead = self._ahead and layer + 1 < self.config.num_layers
        next_one = self.forecast(layer + 1, x) if ahead else None
        return self.forecast(layer, x).on_host() if following is None else following, next_one

    def _warm_up(self) -> None:
        """Compile what a request runs, so that none of it counts as a request's time."""
        self.prefill_logits(np.zeros(1, np.int32), 0, 0)
        # As a piece too: the line above may have run it as a step's.
        self.prefill_together([Piece(np.zeros(1, np.int32), 0, 0)])
        for n in range(1, self.dense.batch + 1):  # writes position 0 of the cache, which a prompt writes anew
            nothing = np.zeros(n, np.int32)
            self._forward(nothing, nothing, np.arange(n, dtype=np.int32))
        self.migrator.warm_up()

    @property
    def few_tokens(self) -> int:
        """Tokens at a prompt's end that are run as those of a step, at most.

        Only the host's kernels take several of one sequence in a step. None where pieces give more than another
        rounding: a forecast might miss something, int8 inputs are coarser, and where a threshold drops a neuron
        whole, a rounding decides on it, which in a step is another one where the neuron has moved.
        """
        if self._wants_pieces:
            return 0
        return self.dense.batch if isinstance(self.dense, HostDense) else 1

    @property
    def mixes(self) -> bool:
        """Whether sequences may decode in a prompt's piece: it gives what a step does, and no policy misses counts."""
        return self._whole is not None and not self._wants_pieces

    def share(self, left: Sequence[int], *, beside: int = 0) -> list[int]:
        """Return how many tokens of each prompt's rest to run in the next piece; see ``Prefill.share``."""
        return self.prefill.share(left, beside=beside)

    def prefill_together(self, prompts: Sequence[Piece]) -> Float[np.ndarray, "n V"]:
        """Run one piece of each of n prompts, none twice, and return the logits after each one's last token."""
        x, zero = np.asarray(self.prefill.together(prompts)), self._zero[: len(prompts)]
        return self.dense.logits(x, zero, zero)

    def run_few(self, prompts: Sequence[Piece]) -> Float[np.ndarray, "n V"]:
        """Run the last few tokens of n prompts as a step's; no policy sees them. Returns as ``prefill_together``."""
        ids = np.concatenate([piece.ids for piece in prompts])
        at = np.concatenate([piece.start + np.arange(len(piece.ids), dtype=np.int32) for piece in prompts])
        rows = np.concatenate([np.full(len(piece.ids), piece.row, np.int32) for piece in prompts])
        ends = np.cumsum([len(piece.ids) for piece in prompts]) - 1
        logits = np.empty((len(prompts), self.config.vocab_size), np.float32)
        for first in range(0, len(ids), self.dense.batch):
            some = slice(first, first + self.dense.batch)
            run = self._forward(ids[some], at[some], rows[some])
            here = np.flatnonzero((ends >= first) & (ends < first + len(ids[some])))
            logits[here] = run.logits[ends[here] - first]
        return logits

    def prefill_logits(self, ids: Int[np.ndarray, " T"], start: int, row: int) -> Float[np.ndarray, " V"]:
        """Run a prompt's tokens from position ``start`` of a row and return the logits after the last one."""
        done, logits = 0, np.empty((1, 0), np.float32)
        while (left := len(ids) - done) > self.few_tokens:
            (tokens,) = self.share([left])
            logits = self.prefill_together([Piece(ids[done : done + tokens], start + done, row)])
            done += tokens
        return self.run_few([Piece(ids[done:], start + done, row)])[0] if left else logits[0]

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

    def _launch_residents(
        self, layer: int, h: Any, chosen: Bool[np.ndarray, "n F"] | None
    ) -> tuple[Any, Any]:
        """Dispatch the residents' part; it runs while the host computes the residual."""
        valid = self._valid[layer]
        if chosen is not None:  # an empty slot's neuron is none: its place is masked by ``valid``
            chosen = chosen[:, self.table.neuron_of[layer]] & valid
            valid = chosen.any(axis=0)
        if not valid.any():
            return self._zero[: len(h)], None
        limit = np.float32(self.thresholds[layer])
        slots, scales, biases = self.migrator.slots[layer], self._scales[layer], self._slot_biases[layer]
        return self._resident(slots, scales, biases, valid, chosen, limit, h)

    def _residual(
        self, layer: int, h: Float[np.ndarray, "n D"], forecast: Forecasted | None, run: Pass
    ) -> Float[np.ndarray, "n D"]:
        """Compute the neurons outside the slots, count their users, and add what no computed neuron owns.

        Two buffers take turns: the device has read the one before when it hands out this layer's input.
        """
        y, outside, users = self._y_host[layer % 2][: len(h)], self._outside[layer], run.users[layer]
        if forecast is None:
            self._evaluate(layer, h, outside, y, users)
            run.evaluated += len(outside)
        else:  # each token has neurons of its own
            for b in range(len(h)):
                chosen = forecast.chosen[b]
                ids = outside[chosen if len(outside) == len(chosen) else chosen[outside]]
                self._evaluate(layer, h[b : b + 1], ids, y[b : b + 1], users)
                run.evaluated += len(ids)
            if forecast.rest is not None:
                y += forecast.rest
        if self.dense.down_biases is not None:
            y += self.dense.down_biases[layer]
        return y

    def _evaluate(
        self,
        layer: int,
        h: Float[np.ndarray, "n D"],
        ids: Int[np.ndarray, " m"],
        y: Float[np.ndarray, "n D"],
        users: UInt8[np.ndarray, " F"],
    ) -> None:
        """Write the sum of some neurons to y, and add to each neuron's users."""
        fired = self._fired[: len(h) * len(ids)].reshape(len(h), len(ids))
        # On a CPU device XLA's threads work on the residents at the same time: leave them a core. With 384 of 1536
        # neurons resident a token took 30 ms so, and 36 ms with all cores.
        shared = self._shares_cores and self._valid[layer].any()
        most = max(1, thread_count() - 1) if shared else None
        self._ffns[layer](h, ids, len(ids), y, fired, num_threads=most)
        users[ids] += fired[0] if len(h) == 1 else fired.sum(axis=0, dtype=np.uint8)

    def _add_hits(self, masks: list[Any], users: UInt8[np.ndarray, "L F"]) -> None:
        for layer, mask in enumerate(masks):
            if mask is not None:
                counts = np.asarray(mask).sum(axis=0, dtype=np.uint8)
                slots = np.flatnonzero(counts)
                neurons = self.table.neuron_of[layer][slots]
                users[layer, neurons] = counts[slots]
                self.migrator.note_hits(layer, neurons)

    def _feed_back(self, by_layer: Iterable[Times], times: Times) -> None:
        """Tell the policy the times of each layer, then of the step."""
        for layer, times_here in enumerate(by_layer):
            self.state = self.policy.feedback(self.state, layer, times_here)
        self.state = self.policy.feedback(self.state, None, times)

    def _plan(
        self,
        layer: int,
        active: Bool[np.ndarray, " F"] | Float[np.ndarray, " F"],
        *,
        beside: int | None = None,
    ) -> None:
        """Let the policy plan a layer and send off what it wants moved, where there are slots; nothing here waits.

        Args:
            layer: index of the layer.
            active: what it will compute: its forecast, or, without one, what it computed in this step.
            beside: neurons that the host computes of the layer before in the meantime; None: the plan is for the
                step that follows.
        """
        if not self._has_slots:
            return
        costs = self.meter.costs(layer, self.migrator, beside=beside)
        self.state, plan = self.policy.plan(self.state, layer, active, self.table.held(layer), costs)
        self.migrator.submit(layer, plan)
        if len(plan.evict):
            self._refresh(layer)

    def _refresh(self, layer: int) -> None:
        """Renew what the step reads of the slot table."""
        self._outside[layer] = np.flatnonzero(~self.table.resident(layer)).astype(np.int32)
        self._valid[layer] = self.table.occupied(layer)
        if self.store.biases is not None:
            # A fresh array, by the neurons' places; what an empty slot gets is masked.
            self._slot_biases[layer] = jax.device_put(self.store.biases[layer][self.table.neuron_of[layer]])

    def _run_alone(self, layer: int) -> Any:
        """Dispatch a layer's device part with every slot in use, for one sequence."""
        every = np.ones(int(self.table.capacity[layer]), bool)
        slots, scales, biases = self.migrator.slots[layer], self._scales[layer], self._slot_biases[layer]
        chosen = None if self.forecast is None else every[None]
        limit = np.float32(self.thresholds[layer])
        return self._resident(slots, scales, biases, every, chosen, limit, self._zero[:1])[0]
