"""The engine: a loaded model that generates text and counts what it did."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock, get_ident
from time import perf_counter
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from kairox_jax.balancing import Policy, make_policy
from kairox_jax.config import GenerationConfig, PlacementConfig
from kairox_jax.engine.dense_part import DeviceDense
from kairox_jax.engine.host_dense import HostDense
from kairox_jax.engine.hybrid import Hybrid
from kairox_jax.engine.jitted_hybrid import JittedHybrid
from kairox_jax.engine.loading import (
    build_policy,
    check_dense_settings,
    check_supported,
    dense_thresholds,
    make_plan,
    resolve_context,
)
from kairox_jax.engine.results import Chunk, GenerationResult
from kairox_jax.engine.sampling import make_rng, sample
from kairox_jax.engine.statistics import Statistics
from kairox_jax.engine.text import TextStream
from kairox_jax.engine.whole import Whole
from kairox_jax.host import limit_threads, thread_count
from kairox_jax.host.callback import check_backend
from kairox_jax.io import Checkpoint, TraceRecorder, open_checkpoint
from kairox_jax.models import find_sparsity, load_decoder, resolve_thresholds
from kairox_jax.nvidia import limit_device_memory
from kairox_jax.placement import BudgetPlan, load_store, record_layout
from pallas_kernels.implementations import resolve_implementation

logger = logging.getLogger("kairox")


class Engine:
    """Loads a model and generates text with it, one request at a time.

    Args:
        model: a registered name, a local path, or a Hugging Face repository.
        mode: "dense" (every neuron, on the device) or "exact" (residents on the device, the active rest on the host).
        placement: memory budget and policy.
        context_length: positions of a sequence; None takes the model's, at most 2048.
        threads: host threads; None takes the physical cores.
        sparsity: folder with thresholds and profile; None takes the shipped ones.

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
    ) -> None:
        placement = PlacementConfig() if placement is None else placement
        checkpoint = open_checkpoint(model)
        self.config = config = checkpoint.config
        check_supported(config)
        if placement.vram_budget_bytes is not None:
            limit_device_memory(placement.vram_budget_bytes)
        self.device = jax.devices()[0]
        check_backend(placement.host_callback, self.device.platform)
        self.context_length = resolve_context(config, context_length)
        self.plan = make_plan(
            config,
            record_layout(checkpoint),
            mode=mode,
            placement=placement,
            context_length=self.context_length,
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
        self._cached: list[int] = []
        self._lock, self._busy_thread = Lock(), 0
        self.policy_name = None if mode == "dense" else placement.policy
        self.implementation = resolve_implementation("auto", self.device.platform)
        if mode == "dense" and self.device.platform != "cpu":
            self._whole = Whole(load_decoder(checkpoint), context_length=self.context_length)
            self._whole.prefill(np.zeros(1, np.int32), 0)  # compiles, as Hybrid does
            self._whole.step(0, 0)
        elif mode == "dense":
            self._hybrid = self._load_hybrid(
                checkpoint, dense_thresholds(config), make_policy("static"), None, placement
            )
        else:
            found = find_sparsity(checkpoint, sparsity)
            thresholds = resolve_thresholds(config, found)
            prior = None if found is None else found.frequency
            if prior is None:
                logger.warning(
                    "no activation profile for this model: the policy starts without knowing any neuron"
                )
            policy = build_policy(placement, has_prior=prior is not None)
            self._hybrid = self._load_hybrid(checkpoint, thresholds, policy, prior, placement)

    def _load_hybrid(
        self,
        checkpoint: Checkpoint,
        thresholds: Float[np.ndarray, " L"],
        policy: Policy,
        prior: Float[np.ndarray, "L F"] | None,
        placement: PlacementConfig,
    ) -> Hybrid:
        """Load the records and the dense part; where the device is the CPU itself, host kernels run the latter."""
        platform, callback = self.device.platform, placement.host_callback
        settings: dict[str, Any] = dict(
            config=self.config,
            thresholds=thresholds,
            policy=policy,
            prior=prior,
            slots_per_layer=0 if self.mode == "dense" else self.plan.slots_per_layer,
            max_moves=placement.max_moves,
            implementation=self.implementation,
        )
        if callback != "split":
            dense = DeviceDense(checkpoint, batch=1, context_length=self.context_length)
            return JittedHybrid(
                load_store(checkpoint), dense, host_callback=callback, platform=platform, **settings
            )
        dense_part = HostDense if platform == "cpu" else DeviceDense
        return Hybrid(
            load_store(checkpoint),
            dense_part(checkpoint, batch=1, context_length=self.context_length),
            **settings,
        )

    def generate(
        self,
        prompt: str | Sequence[int],
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
        prompt: str | Sequence[int],
        config: GenerationConfig | None = None,
        *,
        trace: str | Path | None = None,
        reuse: bool = False,
    ) -> Iterator[Chunk]:
        """Generate and yield text as it comes.

        Args:
            prompt: a text, or token ids.
            config: how to choose tokens and when to stop.
            trace: write the activations of each decode step to this file (not in ``dense`` mode).
            reuse: keep the common beginning of this prompt and the last sequence in the cache.

        Yields:
            Pieces of text that are whole characters and no part of a stop text; the last chunk has the result.

        Raises:
            ValueError: an empty prompt, one that does not fit the context, or a trace in ``dense`` mode.
        """
        if self._whole is None and self._hybrid is None:
            raise ValueError("this engine is closed: make a new one")
        config = GenerationConfig() if config is None else config
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
        self._check_prompt(ids)
        recorder = None
        if trace is not None:
            if self.mode == "dense":
                raise ValueError(
                    "--trace-out needs the active neurons, which --mode dense does not tell: use exact"
                )
            if Path(trace).is_dir() or not Path(trace).absolute().parent.is_dir():
                raise ValueError(f"--trace-out {trace}: name a file in a folder that exists")
            recorder = TraceRecorder({"policy": self.policy_name, "prompt_tokens": len(ids)})
        return self._in_turn(self._run(ids, config, trace, recorder, reuse))

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

    def describe(self) -> str:
        """Return one line: the device, and what runs where."""
        device = f"device {self.device.platform}:{self.device.device_kind}"
        if self.device.platform == "cpu":
            device = "no accelerator found: JAX's CPU backend is the device"
        if self._hybrid is None or self.mode == "dense":
            where = (
                "on the device" if self._whole is not None else f"by host kernels ({self.threads} threads)"
            )
            return f"{device} | dense: all {self.config.num_neurons} neurons a layer, {where}"
        return (
            f"{device} | attention and output: {self._hybrid.dense.name} | {self.plan.slots_per_layer} of "
            f"{self.config.num_neurons} neurons a layer in device slots ({self.implementation} kernels), the active "
            f"rest on the host ({self.threads} threads) | policy {self.policy_name}"
        )

    def _placement(self) -> dict[str, Any]:
        """Return what runs where, for the statistics."""
        if self._hybrid is None:
            return {"dense_part": "device", "neurons": "device"}
        return {
            "dense_part": self._hybrid.dense.name,
            "neurons": "host" if self.mode == "dense" else "device slots and host",
            "slots_per_layer": self._hybrid.table.capacity.tolist(),
            "device_kernels": self.implementation,
            "host_threads": self.threads,
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

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise ValueError("the prompt has no tokens: give at least one character")
        if len(ids) >= self.context_length:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, the context holds {self.context_length} and needs one for the "
                f"answer: shorten the prompt or raise --ctx-size (this model takes up to {self.config.context_length})"
            )
        wrong = [i for i in ids if not 0 <= i < self.config.vocab_size]
        if wrong:
            raise ValueError(f"token id {wrong[0]} is outside the vocabulary 0..{self.config.vocab_size - 1}")

    def _run(
        self,
        ids: list[int],
        config: GenerationConfig,
        trace: str | Path | None,
        recorder: TraceRecorder | None,
        reuse: bool,
    ) -> Iterator[Chunk]:
        stats = Statistics(
            device=f"{self.device.platform}:{self.device.device_kind}",
            mode=self.mode,
            policy=self.policy_name,
            budget=self.plan.to_json(),
            placement=self._placement(),
            prompt_tokens=len(ids),
        )
        if self._hybrid is not None:
            self._hybrid.migrator.take_counts()  # what an abandoned request left
        begin = perf_counter()
        logits = self._prefill(ids, self._common(ids) if reuse else 0)
        stats.prefill_s = perf_counter() - begin
        rng, text = make_rng(config.seed), TextStream(self.tokenizer.token_bytes, config.stop)
        tokens: list[int] = []
        room = min(config.max_tokens, self.context_length - len(ids))
        finish = "length"
        begin = perf_counter()
        while len(tokens) < room:
            token = sample(logits, config, rng)
            if token in self.tokenizer.eos_ids and not config.ignore_eos:
                finish = "stop"
                break
            tokens.append(token)
            piece = text.push(token)
            if text.stopped:
                finish = "stop"
            stats.decode_s += perf_counter() - begin
            yield Chunk(text=piece, token_id=token)
            begin = perf_counter()
            if text.stopped or len(tokens) == room:
                break
            logits = self._step(token, len(ids) + len(tokens) - 1, stats, recorder)
        stats.decode_s += perf_counter() - begin
        stats.generated_tokens = len(tokens)
        self._finish(stats, trace, recorder)
        rest = text.flush()
        result = GenerationResult(
            text=text.text, prompt_token_ids=ids, token_ids=tokens, finish_reason=finish, stats=stats
        )
        yield Chunk(text=rest, result=result)

    def _common(self, ids: list[int]) -> int:
        """Return how many first tokens are in the cache already; the last one is always computed anew."""
        same = 0
        for old, new in zip(self._cached, ids[:-1], strict=False):
            if old != new:
                break
            same += 1
        return same

    def _prefill(self, ids: list[int], start: int) -> Float[np.ndarray, " V"]:
        self._cached = []  # an interrupted prefill leaves nothing that counts
        new = np.asarray(ids[start:], np.int32)
        if self._whole is not None:
            logits = self._whole.prefill(new, start)
        else:
            assert self._hybrid is not None
            logits = self._hybrid.prefill_logits(new, start)
        self._cached = list(ids)
        return logits

    def _step(
        self, token: int, position: int, stats: Statistics, recorder: TraceRecorder | None
    ) -> Float[np.ndarray, " V"]:
        if self._whole is not None:
            logits = self._whole.step(token, position)
        else:
            assert self._hybrid is not None
            batch, counts = self._hybrid.step(np.array([token], np.int32), np.array([position], np.int32))
            logits = batch[0]
            stats.add_step(counts)
            if recorder is not None:
                recorder.add_step(counts.active, token)
        stats.decode_steps += 1
        self._cached = [*self._cached[:position], token]
        return logits

    def _finish(self, stats: Statistics, trace: str | Path | None, recorder: TraceRecorder | None) -> None:
        if self._hybrid is not None:
            stats.resident = self._hybrid.num_resident
            stats.add_moves(self._hybrid.migrator.take_counts())
        if recorder is not None and trace is not None:
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
) -> BudgetPlan:
    """Plan the memory of a model without reading its weights; see ``Engine`` for arguments and errors."""
    checkpoint = open_checkpoint(model)
    return make_plan(
        checkpoint.config,
        record_layout(checkpoint),
        mode=mode,
        placement=PlacementConfig() if placement is None else placement,
        context_length=resolve_context(checkpoint.config, context_length),
        device=jax.devices()[0],
    )
