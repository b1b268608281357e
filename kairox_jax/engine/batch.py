"""Sequences that decode together: admission, prompts piece by piece, one step for all, each one's own end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, TypeVar

import numpy as np
from jaxtyping import Float, Int

from kairox_jax.engine.hybrid import StepCounts
from kairox_jax.engine.prefill import Piece
from kairox_jax.engine.results import Chunk, GenerationResult
from kairox_jax.engine.rows import CacheRows
from kairox_jax.engine.sequence import Sequence
from kairox_jax.engine.statistics import Statistics

T = TypeVar("T")


class Runner(Protocol):
    """A model with the caches of several sequences."""

    @property
    def few_tokens(self) -> int:
        """Tokens at a prompt's end that ``run_few`` takes, at most."""
        ...

    @property
    def mixes(self) -> bool:
        """Whether pieces of prompts may hold tokens that others decode."""
        ...

    def share(self, left: Ids[int], *, beside: int = 0) -> list[int]:
        """Return how many tokens of each prompt's rest to run in the next piece; see ``Prefill.share``."""
        ...

    def prefill_together(self, prompts: Ids[Piece]) -> Float[np.ndarray, "n V"]:
        """Run one piece of each of n prompts and return the logits after each one's last token."""
        ...

    def run_few(self, prompts: Ids[Piece]) -> Float[np.ndarray, "n V"]:
        """Run the last few tokens of n prompts and return the logits after each one's last token."""
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
    def left(self) -> int:
        """Tokens of the prompt that are still to run."""
        return max(len(self.sequence.prompt_ids) - self.position, 0)

    def piece(self, tokens: int) -> Piece:
        """Return so many of the prompt's next tokens."""
        ids = self.sequence.prompt_ids[self.position : self.position + tokens]
        return Piece(np.array(ids, np.int32), self.position, self.row)


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
        """Run a piece of some prompts, and one token of every sequence whose prompt was through before: in the piece
        where the model can, else after it.

        Yields:
            Each sequence's next chunk; the last one of a sequence has its result. An error of one sequence, such as
            logits that are no numbers, ends that one alone.

        Raises:
            Exception: what the model raised; every sequence has ended then.
        """
        decoding = [each for each in self.running if not each.left]
        if self.runner.mixes and 0 < len(decoding) < len(self.running):
            yield from self._run_mixed(decoding)
            return
        few = self.runner.few_tokens
        if waiting := [each for each in self.running if each.left > few]:
            shares = zip(waiting, self.runner.share([each.left for each in waiting]), strict=True)
            group = [(each, tokens) for each, tokens in shares if tokens]
            yield from self._run_prompts(group, self.runner.prefill_together)
        if short := [(each, each.left) for each in self.running if 0 < each.left <= few]:
            yield from self._run_prompts(short, self.runner.run_few)
        if decoding := [each for each in decoding if each in self.running]:
            yield from self._run_step(decoding)

    def cancel(self, running: Running) -> Chunk:
        """End a sequence between two steps; returns its last chunk, with the finish reason "cancelled"."""
        return self._end(running)

    def clear(self) -> None:
        """Drop every sequence and what the cache holds of it, after an error of the model."""
        for running in list(self.running):
            self._leave(running)
            self.rows.forget(running.row, 0)

    def _run_mixed(self, decoding: list[Running]) -> Iterator[Event]:
        """Run prompts and others' next tokens in one piece: together they cost little more than the prompts."""
        prompts = [each for each in self.running if each.left]
        shares = self.runner.share([each.left for each in prompts], beside=len(decoding))
        group = [(each, tokens) for each, tokens in zip(prompts, shares, strict=True) if tokens]
        is_short = sum(tokens for _, tokens in group) + len(decoding) <= self.runner.few_tokens
        run = self.runner.run_few if is_short else self.runner.prefill_together
        yield from self._run_prompts(group, run, decoding)

    def _run_prompts(
        self,
        group: list[tuple[Running, int]],
        run: Callable[[list[Piece]], Float[np.ndarray, "n V"]],
        decoding: Ids[Running] = (),
    ) -> Iterator[Event]:
        """Run so many tokens of each prompt, and the next token of others; each of them counts all of the time."""
        begin = perf_counter()
        pieces = [each.piece(tokens) for each, tokens in group]
        pieces += [
            Piece(np.array(each.sequence.token_ids[-1:], np.int32), each.position, each.row)
            for each in decoding
        ]
        for piece in pieces:
            self.rows.forget(piece.row, piece.start)  # an interrupted piece leaves nothing that counts
        logits = self._guarded(lambda: run(pieces))
        passed_s = perf_counter() - begin
        members = [each for each, _ in group] + [*decoding]
        for each, piece, values in zip(members, pieces, logits, strict=True):
            self.rows.put(piece.row, piece.start, piece.ids.tolist())
            if each.left:
                each.stats.prefill_s += passed_s
            else:
                each.stats.beside_prompts += 1
                each.stats.decode_s += passed_s
            each.position += len(piece.ids)
            if not each.left and each in self.running:  # not cancelled since the piece began
                yield from self._feed(each, values, None)

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
