"""The engine: a loaded model that generates text and counts what it did."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

import numpy as np
from jaxtyping import Bool

from kairox_jax.config import GenerationConfig, PlacementConfig
from kairox_jax.engine.batch import Batch, Running
from kairox_jax.engine.opening import open_model
from kairox_jax.engine.results import Chunk, GenerationResult
from kairox_jax.engine.sequence import Constraint, Sequence
from kairox_jax.engine.statistics import Statistics
from kairox_jax.io import TraceRecorder

logger = logging.getLogger("kairox")


def never() -> bool:
    """Say no: nobody cancels."""
    return False


class Engine:
    """Loads a model and generates text with it, one request at a time; ``batch`` runs several together.

    Args:
        model: a registered name, a local path, or a Hugging Face repository.
        mode: "dense" (every neuron, on the device; by host kernels where that is the CPU), "exact" (residents on the
            device, the active rest on the host), or "predicted" (of both only what predictors
            forecast; the result changes with what they miss).
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
        opened = open_model(
            model,
            mode=mode,
            placement=PlacementConfig() if placement is None else placement,
            context_length=context_length,
            threads=threads,
            sparsity=sparsity,
            predictors=predictors,
            parallel=parallel,
        )
        setup = self.setup = opened.setup
        self.config, self.mode, self.device, self.plan = setup.config, setup.mode, setup.device, setup.plan
        self.context_length, self.parallel = setup.context_length, setup.parallel
        self.policy_name, self.threads = setup.policy_name, setup.threads
        self.tokenizer, self.chat_template = opened.tokenizer, opened.chat_template
        self._whole, self._hybrid = opened.whole, opened.hybrid
        self._lock, self._busy_thread = Lock(), 0
        runner = self._whole or self._hybrid
        assert runner is not None
        self.batch = Batch(runner, parallel, finish_statistics=self._finish_statistics)

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
        self._check_open()
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
        self._check_open()
        ids = list(prompt_ids)
        self.check_request(ids, config)
        sequence = self._sequence(ids, config, constraint)
        return self.batch.add(sequence, self.new_statistics(ids), reuse=True)

    def _check_open(self) -> None:
        if self._whole is None and self._hybrid is None:
            raise ValueError("this engine is closed: make a new one")

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

    def describe(self) -> str:
        """Return one line: the device, and what runs where.

        Raises:
            ValueError: the engine is closed.
        """
        self._check_open()
        return self.setup.describe(self._hybrid)

    def placement(self) -> dict[str, Any]:
        """Return what runs where, for the statistics; raises as ``describe``."""
        self._check_open()
        return self.setup.placement(self._hybrid)

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
