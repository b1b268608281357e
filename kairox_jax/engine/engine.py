"""The engine: a loaded model that generates text and counts what it did."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

from kairox_jax.balancing import Policy, make_policy
from kairox_jax.config import GenerationConfig, PlacementConfig
from kairox_jax.engine.batch import Batch, Running
from kairox_jax.engine.dense_part import DeviceDense
from kairox_jax.engine.forecast import DeviceForecast, HostForecast, predictor_bytes
from kairox_jax.engine.host_dense import HostDense
from kairox_jax.engine.hybrid import Hybrid
from kairox_jax.engine.jitted_hybrid import JittedHybrid
from kairox_jax.engine.link import make_link
from kairox_jax.engine.loading import (
    build_policy,
    check_dense_settings,
    check_host_callback,
    dense_thresholds,
    make_plan,
    resolve_context,
)
from kairox_jax.engine.results import Chunk, GenerationResult
from kairox_jax.engine.sequence import Constraint, Sequence
from kairox_jax.engine.statistics import Statistics
from kairox_jax.engine.whole import Whole
from kairox_jax.host import MAX_BATCH, limit_threads, thread_count
from kairox_jax.io import Checkpoint, Predictors, TraceRecorder, open_checkpoint
from kairox_jax.models import (
    find_predictors,
    find_sparsity,
    gate_thresholded,
    load_decoder,
    predicted_thresholds,
    resolve_thresholds,
)
from kairox_jax.nvidia import limit_device_memory
from kairox_jax.placement import BudgetPlan, load_store, record_layouts, resolve_slot_format
from pallas_kernels.implementations import resolve_implementation

logger = logging.getLogger("kairox")


def never() -> bool:
    """Say no: nobody cancels."""
    return False


class Engine:
    """Loads a model and generates text with it, one request at a time; ``batch`` runs several together.

    Args:
        model: a registered name, a local path, or a Hugging Face repository.
        mode: "dense" (every neuron, on the device), "exact" (residents on the device, the active rest on the host),
            or "predicted" (of both only what predictors forecast; the result changes with what they miss).
        placement: memory budget and policy.
        context_length: positions of a sequence; None takes the model's, at most 2048.
        threads: host threads; None takes the physical cores.
        sparsity: folder with thresholds and profile; None takes the shipped ones.
        predictors: folder with predictors; None takes the model's own or the shipped ones.
        parallel: sequences that ``batch`` can run in one step, 1 to 8; each has a cache of the whole context.

    Raises:
        ValueError: settings that cannot be honoured; the message says the remedy.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        mode: str = "exact",
        placement: PlacementConfig | None = None,
        context_length: int | None = None,
        threads: int | None = None,
        sparsity: str | Path | None = None,
        predictors: str | Path | None = None,
        parallel: int = 1,
    ) -> None:
        if not 1 <= parallel <= MAX_BATCH:
            raise ValueError(f"--parallel {parallel}: choose 1 to {MAX_BATCH} sequences")
        self.parallel = parallel
        placement = PlacementConfig() if placement is None else placement
        checkpoint = open_checkpoint(model)
        self.config = config = checkpoint.config
        if placement.vram_budget_bytes is not None:
            limit_device_memory(placement.vram_budget_bytes)
        if predictors is not None and mode != "predicted":
            raise ValueError(f"--predictors has no effect with --mode {mode}: leave it out, or use predicted")
        forecasts = find_predictors(checkpoint, predictors) if mode == "predicted" else None
        self.device = jax.devices()[0]
        check_host_callback(placement.host_callback, mode, self.device.platform)
        self.context_length = resolve_context(config, context_length)
        self.plan = make_plan(
            config,
            record_layouts(checkpoint),
            mode=mode,
            placement=placement,
            context_length=self.context_length,
            parallel=parallel,
            predictor_bytes=predictor_bytes(forecasts),
            device=self.device,
        )
        self.mode = mode
        if mode == "dense":
            check_dense_settings(placement, sparsity)
        if threads is not None:
            limit_threads(threads)
        self.threads = thread_count()
        self.tokenizer = checkpoint.tokenizer()
        self.chat_template = checkpoint.chat_template
        self._whole: Whole | None = None
        self._hybrid: Hybrid | None = None
        self._lock, self._busy_thread = Lock(), 0
        self.policy_name = None if mode == "dense" else placement.policy_name
        self.implementation = resolve_implementation("auto", self.device.platform)
        self.slot_format = resolve_slot_format(placement.slot_format, self.device.platform)
        self.host_activations = placement.host_activations
        if mode == "dense" and self.device.platform != "cpu":
            if self.host_activations != PlacementConfig.host_activations:
                raise ValueError(
                    f"--host-activations {self.host_activations} has no effect with --mode dense on "
                    f"{self.device.platform}: leave it out, or use --mode exact"
                )
            decoder = load_decoder(checkpoint)
            self._whole = Whole(decoder, batch=parallel, context_length=self.context_length)
            self._whole.warm_up()
        elif mode == "dense":
            self._hybrid = self._load_hybrid(
                checkpoint, dense_thresholds(config), make_policy("static"), None, placement
            )
        else:
            found = find_sparsity(checkpoint, sparsity)
            checkpoint = gate_thresholded(checkpoint, found)
            self.config = config = checkpoint.config
            active = resolve_thresholds if forecasts is None else predicted_thresholds
            thresholds = active(config, found)
            prior = None if found is None else found.frequency
            if prior is None:
                logger.warning(
                    "no activation profile for this model: the policy starts without knowing any neuron"
                )
            policy = build_policy(placement, has_prior=prior is not None)
            self._hybrid = self._load_hybrid(checkpoint, thresholds, policy, prior, placement, forecasts)
        runner = self._whole or self._hybrid
        assert runner is not None
        self.batch = Batch(runner, parallel, finish_statistics=self._finish_statistics)

    def _load_hybrid(
        self,
        checkpoint: Checkpoint,
        thresholds: Float[np.ndarray, " L"],
        policy: Policy,
        prior: Float[np.ndarray, "L F"] | None,
        placement: PlacementConfig,
        predictors: Predictors | None = None,
    ) -> Hybrid:
        """Load the records and the dense part; where the device is the CPU itself, host kernels run the latter."""
        platform, callback = self.device.platform, placement.host_callback
        sizes: dict[str, int] = dict(batch=self.parallel, context_length=self.context_length)
        if platform == "cpu" and callback == "split":
            dense = HostDense(checkpoint, activations=placement.host_activations, **sizes)
        else:
            dense = DeviceDense(checkpoint, **sizes)
        forecast = None
        if predictors is not None:
            on_host = isinstance(dense, HostDense)
            forecast = (
                HostForecast(predictors, batch=self.parallel) if on_host else DeviceForecast(predictors)
            )
        settings: dict[str, Any] = dict(
            config=self.config,
            thresholds=thresholds,
            policy=policy,
            prior=prior,
            slots_per_layer=0 if self.mode == "dense" else self.plan.slots_per_layer,
            slot_format=self.slot_format,
            max_moves=placement.max_moves,
            implementation=self.implementation,
            forecast=forecast,
            link=make_link(placement.emulated_link),
            host_activations=placement.host_activations,
        )
        store = load_store(checkpoint)
        if callback == "split":
            return Hybrid(store, dense, **settings)
        assert isinstance(dense, DeviceDense)
        return JittedHybrid(store, dense, host_callback=callback, platform=platform, **settings)

    def generate(
        self,
        prompt: str | Ids[int],
        config: GenerationConfig | None = None,
        *,
        trace: str | Path | None = None,
        reuse: bool = False,
    ) -> GenerationResult:
        """Generate and return everything at once; see ``stream``."""
        result = None
        for chunk in self.stream(prompt, config, trace=trace, reuse=reuse):
            result = chunk.result
        assert result is not None
        return result

    def stream(
        self,
        prompt: str | Ids[int],
        config: GenerationConfig | None = None,
        *,
        trace: str | Path | None = None,
        reuse: bool = False,
        cancelled: Callable[[], bool] = never,
        constraint: Constraint | None = None,
    ) -> Iterator[Chunk]:
        """Generate and yield text as it comes.

        Args:
            prompt: a text, or token ids.
            config: how to choose tokens and when to stop.
            trace: write the activations of each decode step to this file (not in ``dense`` mode).
            reuse: keep the common beginning of this prompt and the last sequence in the cache.
            cancelled: asked between the pieces of a prompt and before each token; the last chunk's result then
                has the finish reason "cancelled".
            constraint: restricts the tokens.

        Yields:
            Pieces of text that are whole characters and no part of a stop text; the last chunk has the result.

        Raises:
            ValueError: an empty prompt, one that does not fit the context, a bias for a token that does not
                exist, or a trace in ``dense`` mode.
        """
        if self._whole is None and self._hybrid is None:
            raise ValueError("this engine is closed: make a new one")
        config = GenerationConfig() if config is None else config
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
        self.check_request(ids, config)
        recorder = None
        if trace is not None:
            if self.mode == "dense":
                raise ValueError(
                    "--trace-out needs the active neurons, which --mode dense does not tell: use exact"
                )
            if Path(trace).is_dir() or not Path(trace).absolute().parent.is_dir():
                raise ValueError(f"--trace-out {trace}: name a file in a folder that exists")
            recorder = TraceRecorder({"policy": self.policy_name, "prompt_tokens": len(ids)})
        sequence = self._sequence(ids, config, constraint)
        return self._in_turn(self._run(sequence, trace, recorder, reuse, cancelled))

    def begin(
        self, prompt_ids: Ids[int], config: GenerationConfig, *, constraint: Constraint | None = None
    ) -> Running:
        """Add a request to ``batch``, for a caller that drives it alone (no stream may be open).

        Raises:
            ValueError: a request that ``check_request`` refuses, or every row of the cache is in use.
        """
        ids = list(prompt_ids)
        self.check_request(ids, config)
        sequence = self._sequence(ids, config, constraint)
        return self.batch.add(sequence, self.new_statistics(ids), reuse=True)

    def _sequence(self, ids: list[int], config: GenerationConfig, constraint: Constraint | None) -> Sequence:
        room = self.context_length - len(ids)
        return Sequence(ids, config, self.tokenizer, room=room, constraint=constraint)

    def _in_turn(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Run one request at a time: those of other threads wait, one of the same thread would wait forever."""
        if self._busy_thread == get_ident():
            raise ValueError("a stream of this engine is still open: read it to its end or close it first")
        with self._lock:
            self._busy_thread = get_ident()
            try:
                yield from chunks
            finally:
                self._busy_thread = 0

    def prepare(self) -> bool:
        """Compile one more shape that a prompt may need, up to a second of work; return whether there was one.

        For whoever drives ``batch`` and has nothing else to do: a later prompt of that shape then starts at once.
        """
        return self._hybrid is not None and self._hybrid.prefill.prepare()

    def describe(self) -> str:
        """Return one line: the device, and what runs where."""
        device = f"device {self.device.platform}:{self.device.device_kind}"
        if self.device.platform == "cpu":
            device = "no accelerator found: JAX's CPU backend is the device"
        if self._hybrid is None or self.mode == "dense":
            where = "on the device" if self._whole is not None else f"by host kernels ({self._host_part()})"
            return f"{device} | dense: all {self.config.num_neurons} neurons a layer, {where}"
        link = self._hybrid.migrator.link.name
        some = "forecast" if self.mode == "predicted" else "active"
        most, slots = self.config.num_neurons, self.plan.slots_per_layer
        here = f"the host ({self._host_part()})"
        neurons = (
            f"{slots} of {most} neurons a layer in {self.slot_format} device slots ({self.implementation} kernels), "
            f"the {some} rest on {here} | policy {self.policy_name}"
            if slots
            else f"the {some} of {most} neurons a layer on {here}, none in a device slot"
        )
        return f"{device} | attention and output: {self._hybrid.dense.name} | {neurons}" + (
            "" if link == "device" else f" | link: {link}"
        )

    def _host_part(self) -> str:
        return f"{self.threads} threads, {self.host_activations} activations"

    def placement(self) -> dict[str, Any]:
        """Return what runs where, for the statistics."""
        if self._hybrid is None:
            return {"dense_part": "device", "neurons": "device"}
        return {
            "dense_part": self._hybrid.dense.name,
            "neurons": "host" if self.mode == "dense" else "device slots and host",
            "slots_per_layer": self._hybrid.table.capacity.tolist(),
            "device_kernels": self.implementation,
            "slot_format": self.slot_format,
            "host_threads": self.threads,
            "host_activations": self.host_activations,
            "link": self._hybrid.migrator.link.name,
        }

    def close(self) -> None:
        """Stop background work and drop the model."""
        if self._hybrid is not None:
            self._hybrid.close()
        self._hybrid = self._whole = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def residency(self) -> Bool[np.ndarray, "L F"]:
        """Return which neurons the device computes now; may be called from any thread, for a picture."""
        shape = (self.config.num_layers, self.config.num_neurons)
        if self._hybrid is None:
            return np.full(shape, self._whole is not None)
        return np.stack([self._hybrid.table.resident(layer) for layer in range(shape[0])])

    def policy_report(self) -> dict[str, float]:
        """Return the policy's own figures, such as the guide's modifier; empty where it has none."""
        report = None if self._hybrid is None else getattr(self._hybrid.policy, "report", None)
        return {} if report is None or self._hybrid is None else report(self._hybrid.state)

    def check_request(self, ids: list[int], config: GenerationConfig) -> None:
        """Raise ``ValueError`` for a prompt or settings that this model cannot take."""
        if not ids:
            raise ValueError("the prompt has no tokens: give at least one character")
        if len(ids) >= self.context_length:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, the context holds {self.context_length} and needs one for the "
                f"answer: shorten the prompt or raise --ctx-size (this model takes up to {self.config.context_length})"
            )
        wrong = [i for i in (*ids, *config.logit_bias) if not 0 <= i < self.config.vocab_size]
        if wrong:
            raise ValueError(f"token id {wrong[0]} is outside the vocabulary 0..{self.config.vocab_size - 1}")

    def _run(
        self,
        sequence: Sequence,
        trace: str | Path | None,
        recorder: TraceRecorder | None,
        reuse: bool,
        cancelled: Callable[[], bool],
    ) -> Iterator[Chunk]:
        batch = self.batch
        running = batch.add(sequence, self.new_statistics(sequence.prompt_ids), reuse=reuse)
        if recorder is not None:
            batch.on_step = lambda counts, tokens: recorder.add_step(counts.active, tokens[0])
        try:
            while running.result is None:
                if cancelled():
                    yield batch.cancel(running)
                    break
                for _, chunk in batch.advance():
                    if isinstance(chunk, Exception):
                        raise chunk
                    if chunk.result is not None and recorder is not None and trace is not None:
                        self._write_trace(recorder, trace, chunk.result.stats)
                    yield chunk
        finally:
            batch.on_step = None
            if running in batch.running:
                batch.cancel(running)

    def new_statistics(self, prompt_ids: list[int]) -> Statistics:
        """Return the statistics of a request that begins: what is known before."""
        if self._hybrid is not None and not self.batch.running:
            self._hybrid.migrator.take_counts()  # what an abandoned request left
        return Statistics(
            device=f"{self.device.platform}:{self.device.device_kind}",
            mode=self.mode,
            policy=self.policy_name,
            budget=self.plan.to_json(),
            placement=self.placement(),
            prompt_tokens=len(prompt_ids),
        )

    def _finish_statistics(self, stats: Statistics) -> None:
        if self._hybrid is not None:
            stats.resident = self._hybrid.num_resident
            stats.add_moves(self._hybrid.migrator.take_counts())

    @staticmethod
    def _write_trace(recorder: TraceRecorder, trace: str | Path, stats: Statistics) -> None:
        if stats.decode_steps:
            recorder.write(trace)
        else:
            logger.warning(
                "no trace was written to %s: the only token came from the prefill, ask for more", trace
            )


def plan_only(
    model: str | Path,
    *,
    mode: str = "exact",
    placement: PlacementConfig | None = None,
    context_length: int | None = None,
    predictors: str | Path | None = None,
    parallel: int = 1,
) -> BudgetPlan:
    """Plan the memory of a model without reading its weights; see ``Engine`` for arguments and errors."""
    checkpoint = open_checkpoint(model)
    forecasts = find_predictors(checkpoint, predictors) if mode == "predicted" else None
    return make_plan(
        checkpoint.config,
        record_layouts(checkpoint),
        mode=mode,
        placement=PlacementConfig() if placement is None else placement,
        context_length=resolve_context(checkpoint.config, context_length),
        parallel=parallel,
        predictor_bytes=predictor_bytes(forecasts),
        device=jax.devices()[0],
    )
