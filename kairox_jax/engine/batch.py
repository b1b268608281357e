"""Sequences that decode together: admission, prompts piece by piece, one step for all, each one's own end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, TypeVar

import numpy as np
from jaxtyping import Float, Int

from kairox_jax.engine.hybrid import StepCounts
from kairox_jax.engine.results import Chunk, GenerationResult
from kairox_jax.engine.rows import CacheRows
from kairox_jax.engine.sequence import Sequence
from kairox_jax.engine.statistics import Statistics

T = TypeVar("T")


class Runner(Protocol):
    """A model with the caches of several sequences."""

    @property
    def piece_tokens(self) -> int:
        """Tokens of a prompt that are run before other sequences have their turn."""
        ...

    def prefill_logits(self, ids: Int[np.ndarray, " T"], start: int, row: int) -> Float[np.ndarray, " V"]:
        """Run a prompt's tokens from position ``start`` of a row and return the logits after the last one."""
        ...

    def step(
        self, ids: Int[np.ndarray, " n"], start: Int[np.ndarray, " n"], rows: Int[np.ndarray, " n"]
    ) -> tuple[Float[np.ndarray, "n V"], StepCounts | None]:
        """Decode one token of each of n sequences."""
        ...

    def copy_row(self, source: int, target: int, end: int) -> None:
        """Copy the first ``end`` positions of one row of the cache to another."""
        ...


@dataclass
class Running:
    """A sequence in the batch.

    Attributes:
        sequence: its tokens and text.
        row: its row of the cache.
        position: of the next token to run: of the prompt while it is below the prompt's length.
        stats: counts and times; of a shared step each of its sequences counts all of it.
        result: once it has ended.
    """

    sequence: Sequence
    row: int
    position: int
    stats: Statistics
    result: GenerationResult | None = None

    @property
    def in_prompt(self) -> bool:
        """Whether the prompt is not through yet."""
        return self.position < len(self.sequence.prompt_ids)


Event = tuple[Running, Chunk | Exception]


class Batch:
    """Runs up to B sequences through one model.

    Args:
        runner: the model.
        num_rows: B, rows of its cache.
        finish_statistics: completes a sequence's statistics at its end.

    Attributes:
        on_step: is told what each step did and its tokens, where it is set.
    """

    def __init__(
        self, runner: Runner, num_rows: int, *, finish_statistics: Callable[[Statistics], None]
    ) -> None:
        self.runner, self.rows, self.running = runner, CacheRows(num_rows), list[Running]()
        self.on_step: Callable[[StepCounts, list[int]], None] | None = None
        self._finish_statistics = finish_statistics

    def add(self, sequence: Sequence, stats: Statistics, *, reuse: bool) -> Running:
        """Take a sequence in.

        Args:
            sequence: to run.
            stats: of it, with what is known before.
            reuse: begin with what the cache holds of this prompt.

        Raises:
            ValueError: every row is in use.
        """
        lease = self.rows.take(sequence.prompt_ids, reuse=reuse)
        if lease.copy_from is not None:
            self.runner.copy_row(lease.copy_from, lease.row, lease.start)
        stats.reused_tokens = lease.start
        running = Running(sequence, lease.row, lease.start, stats)
        self.running.append(running)
        return running

    def advance(self) -> Iterator[Event]:
        """Run one piece of one prompt, then one token of every sequence whose prompt is through.

        Yields:
            Each sequence's next chunk; the last one of a sequence has its result. An error of one sequence, such as
            logits that are no numbers, ends that one alone.

        Raises:
            Exception: what the model raised; every sequence has ended then.
        """
        decoding = [each for each in self.running if not each.in_prompt]
        waiting = next((each for each in self.running if each.in_prompt), None)
        if waiting is not None:
            yield from self._run_piece(waiting)
        if decoding:
            yield from self._run_step(decoding)

    def cancel(self, running: Running) -> Chunk:
        """End a sequence between two steps; returns its last chunk, with the finish reason "cancelled"."""
        return self._end(running)

    def clear(self) -> None:
        """Drop every sequence and what the cache holds of it, after an error of the model."""
        for running in list(self.running):
            self._leave(running)
            self.rows.forget(running.row, 0)

    def _run_piece(self, running: Running) -> Iterator[Event]:
        prompt, first = running.sequence.prompt_ids, running.position
        last = min(first + self.runner.piece_tokens, len(prompt))
        begin = perf_counter()
        self.rows.forget(running.row, first)  # an interrupted piece leaves nothing that counts
        logits = self._guarded(
            lambda: self.runner.prefill_logits(np.asarray(prompt[first:last], np.int32), first, running.row)
        )
        self.rows.put(running.row, first, prompt[first:last])
        running.position = last
        running.stats.prefill_s += perf_counter() - begin
        if not running.in_prompt:
            yield from self._feed(running, logits, None)

    def _run_step(self, decoding: list[Running]) -> Iterator[Event]:
        begin = perf_counter()
        tokens = [each.sequence.token_ids[-1] for each in decoding]
        ids, start, rows = (
            np.array(values, np.int32)
            for values in (tokens, [each.position for each in decoding], [each.row for each in decoding])
        )
        logits, counts = self._guarded(lambda: self.runner.step(ids, start, rows))
        if self.on_step is not None and counts is not None:
            self.on_step(counts, tokens)
        step_s = perf_counter() - begin
        for each, token, values in zip(decoding, tokens, logits, strict=True):
            self.rows.put(each.row, each.position, [token])
            each.position += 1
            each.stats.decode_steps += 1
            each.stats.decode_s += step_s
            if counts is not None:
                each.stats.add_step(counts)
            if each in self.running:  # not cancelled since the step began
                yield from self._feed(each, values, counts)

    def _feed(
        self, running: Running, logits: Float[np.ndarray, " V"], counts: StepCounts | None
    ) -> Iterator[Event]:
        """Choose the token after these logits, and end the sequence where it is the last."""
        sequence, begin = running.sequence, perf_counter()
        try:
            chosen = None if sequence.finish_reason is not None else sequence.feed(logits)
        except Exception as error:
            self._leave(running)
            yield running, error
            return
        running.stats.decode_s += perf_counter() - begin
        if chosen is not None:
            yield (
                running,
                Chunk(token_id=chosen[0], text=chosen[1], logprobs=sequence.take_logprobs(), step=counts),
            )
        if sequence.finish_reason is not None and running in self.running:
            yield running, self._end(running)

    def _end(self, running: Running) -> Chunk:
        sequence, stats = running.sequence, running.stats
        self._leave(running)
        stats.generated_tokens = len(sequence.token_ids)
        self._finish_statistics(stats)
        rest = sequence.flush()
        running.result = GenerationResult(
            text=sequence.text,
            prompt_token_ids=sequence.prompt_ids,
            token_ids=sequence.token_ids,
            finish_reason=sequence.finish_reason or "cancelled",
            stats=stats,
        )
        return Chunk(text=rest, logprobs=sequence.take_logprobs(), result=running.result)

    def _leave(self, running: Running) -> None:
        self.running.remove(running)
        self.rows.free(running.row)

    def _guarded(self, run: Callable[[], T]) -> T:
        try:
            return run()
        except BaseException:
            self.clear()
            raise
