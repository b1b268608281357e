"""Requests on their way: what to generate, and the ticket by which a thread or asyncio reads the chunks."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from time import monotonic

from kairox_jax.config import GenerationConfig
from kairox_jax.engine.results import Chunk
from kairox_jax.engine.sequence import Constraint


class ServingError(RuntimeError):
    """A request that was not served to its end; the message says why."""


class QueueFull(ServingError):
    """Too many requests wait already."""


class NotReady(ServingError):
    """The model is still loading, or the worker is closing."""


class Cancelled(ServingError):
    """The caller cancelled the request."""


class TimedOut(ServingError):
    """The request took longer than it was given."""


class Interrupted(ServingError):
    """The worker was closed before the request was done."""


class GenerationFailed(ServingError):
    """The engine raised an error; it is in the log."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to generate.

    Attributes:
        prompt_ids: the prompt's tokens.
        config: how to choose tokens and when to stop.
        constraint: makes the state of a constrained text, or None.
    """

    prompt_ids: tuple[int, ...]
    config: GenerationConfig
    constraint: Callable[[], Constraint] | None = None

    def copies(self, count: int) -> list[Request]:
        """Return ``count`` requests with the seeds seed, seed + 1, and so on."""
        return [replace(self, config=replace(self.config, seed=self.config.seed + i)) for i in range(count)]


class Ticket:
    """A request on its way: iterate over it (in a thread, or asynchronously) for its chunks; the last has the result.

    The iteration raises a ``ServingError`` where the request does not come to its end.
    """

    def __init__(self, request: Request, *, timeout_s: float | None) -> None:
        self.request, self.submitted_at = request, monotonic()
        self._deadline = None if timeout_s is None else self.submitted_at + timeout_s
        self._timeout_s = timeout_s
        self._arrived = threading.Condition()
        self._items: deque[Chunk | ServingError] = deque()
        self._wake: Callable[[], object] | None = None
        self._ended = False
        self._reason: ServingError | None = None

    @property
    def reason(self) -> ServingError | None:
        """Why the work should stop, or None; the worker looks before each token and each piece of a prompt."""
        if self._reason is None and self._deadline is not None and monotonic() > self._deadline:
            self._reason = TimedOut(f"the request took longer than {self._timeout_s:g} s")
        return self._reason

    def cancel(self, reason: ServingError | None = None) -> None:
        """Stop the work within one token."""
        if self._reason is None:
            self._reason = Cancelled("the request was cancelled") if reason is None else reason

    def put(self, item: Chunk | ServingError) -> None:
        """Hand a chunk, or the error that ends the request, to whoever iterates (the worker's side)."""
        with self._arrived:
            if self._ended:
                return
            self._ended = isinstance(item, ServingError) or item.result is not None
            self._items.append(item)
            self._arrived.notify_all()
            wake = self._wake
        if wake is not None:
            try:
                wake()
            except RuntimeError:  # the loop of the reader is closed: nobody reads on
                self.cancel()

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            with self._arrived:
                while not self._items:
                    if not self._arrived.wait(self._remaining_s()):
                        self._expire()
                item = self._items.popleft()
            yield _checked(item)
            if isinstance(item, Chunk) and item.result is not None:
                return

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        arrived, loop = asyncio.Event(), asyncio.get_running_loop()
        with self._arrived:
            self._wake = lambda: loop.call_soon_threadsafe(arrived.set)
        remaining_s = self._remaining_s()
        # One timer for all tokens: waiting for each with a limit of its own would make a task for each.
        timer = None if remaining_s is None else loop.call_later(remaining_s, arrived.set)
        try:
            while True:
                arrived.clear()
                while self._items:
                    item = self._items.popleft()
                    yield _checked(item)
                    if isinstance(item, Chunk) and item.result is not None:
                        return
                if self._remaining_s() == 0:
                    self._expire()
                await arrived.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _remaining_s(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - monotonic(), 0.0)

    def _expire(self) -> None:
        """Raise the timeout, unless a last item came just now."""
        if not self._items:
            self.cancel(TimedOut(f"the request took longer than {self._timeout_s:g} s"))
            raise self._reason or TimedOut("the request took too long")


def _checked(item: Chunk | ServingError) -> Chunk:
    if isinstance(item, ServingError):
        raise item
    return item
