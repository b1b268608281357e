"""One thread that owns an engine and serves requests from a bounded queue.

The engine's batch runs as many of them together as its cache has rows.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import Protocol

from kairox_jax.engine.batch import Running
from kairox_jax.engine.engine import Engine
from kairox_jax.engine.results import Chunk
from kairox_jax.engine.tickets import (
    GenerationFailed,
    Interrupted,
    NotReady,
    QueueFull,
    Request,
    ServingError,
    Ticket,
)

logger = logging.getLogger("kairox")


class Observer(Protocol):
    """Hears what a worker does, on the worker's thread."""

    def chunk(self, ticket: Ticket, chunk: Chunk) -> None:
        """Hear of a chunk, before the reader gets it."""
        ...

    def ended(self, ticket: Ticket, outcome: str) -> None:
        """Hear of a request's end: a finish reason, or the name of the error's class."""
        ...


class Worker:
    """Serves requests with an engine that it opens, uses and closes on a thread of its own.

    Args:
        open_engine: makes the engine.
        max_waiting: the most requests that wait; more are refused.
        observer: hears what happens.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        *,
        max_waiting: int = 64,
        observer: Observer | None = None,
    ) -> None:
        if max_waiting < 1:
            raise ValueError(f"max_waiting {max_waiting} must be 1 or more")
        self._open, self._max_waiting, self._observer = open_engine, max_waiting, observer
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._active: list[Ticket] = []
        self._running: dict[Ticket, Running] = {}  # the worker's thread alone looks at it
        self._engine: Engine | None = None
        self._closing = False
        self.error: Exception | None = None  # why there is no engine
        self._thread = threading.Thread(target=self._run, name="kairox-worker", daemon=True)

    def start(self) -> None:
        """Begin to load; returns at once."""
        self._thread.start()

    @property
    def state(self) -> str:
        """Return loading, ready, closing or failed."""
        if self.error is not None:
            return "failed"
        if self._closing:
            return "closing"
        return "loading" if self._engine is None else "ready"

    @property
    def engine(self) -> Engine:
        """The engine, for what does not generate.

        Raises:
            NotReady: there is none yet, or no longer.
        """
        engine = self._engine
        if engine is None or self._closing:
            raise NotReady(f"the server is {self.state}: try again later")
        return engine

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Requests that are being served."""
        return len(self._active)

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until the engine is loaded, or could not be; return whether it is there."""
        with self._changed:
            self._changed.wait_for(lambda: self.state != "loading", timeout_s)
        return self.state == "ready"

    def submit(self, requests: Ids[Request], *, timeout_s: float | None = None) -> list[Ticket]:
        """Queue requests, all or none.

        Args:
            requests: what to generate.
            timeout_s: from now, for each, waiting included.

        Returns:
            A ticket for each.

        Raises:
            ValueError: a request that the model cannot take.
            QueueFull: too many wait already.
            NotReady: the model is still loading, or the worker is closing.
        """
        engine = self.engine
        for request in requests:
            engine.check_request(list(request.prompt_ids), request.config)
        tickets = [Ticket(request, timeout_s=timeout_s) for request in requests]
        with self._changed:
            if self._closing:
                raise NotReady("the server is closing")
            self._drop_stopped()
            # Requests that a free row takes next do not count as waiting.
            room = self._max_waiting + engine.parallel - len(self._active)
            if len(self._waiting) + len(tickets) > room:
                raise QueueFull(
                    f"{len(self._waiting)} requests wait and at most {self._max_waiting} may: try again later"
                )
            self._waiting.extend(tickets)
            self._changed.notify_all()
        return tickets

    def close(self, *, finish: bool, grace_s: float = 0.0, patience_s: float = 30.0) -> bool:
        """Take no more requests, end those that are there, and close the engine.

        Args:
            finish: let requests end by themselves within ``grace_s``; after it, or otherwise, they get ``Interrupted``.
            grace_s: how long that may take.
            patience_s: how long to wait for the thread after that; loading cannot be interrupted.

        Returns:
            Whether the thread has ended.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if not self._thread.is_alive():
            return True
        if finish:
            self._thread.join(grace_s)
        with self._changed:
            for ticket in (*self._waiting, *self._active):
                ticket.cancel(Interrupted("the server is shutting down"))
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            engine = self._open()
        except Exception as error:
            self.error = error
            with self._changed:
                self._changed.notify_all()
            return
        with self._changed:
            self._engine = engine
            self._changed.notify_all()
        try:
            while self._admit(engine):
                self._advance(engine)
        finally:
            engine.close()
            with self._changed:  # nobody waits for ever, whatever ended the loop
                self._closing = True
                for ticket in (*self._active, *self._waiting):
                    ticket.put(Interrupted("the server has stopped"))

    def _admit(self, engine: Engine) -> bool:
        """Take in what has room, waiting while there is nothing to do; False once the worker is closing and idle."""
        while True:
            with self._changed:
                self._drop_stopped()
                while self._is_idle():
                    self._changed.wait()
                    self._drop_stopped()
                room = engine.batch.rows.num_free
                tickets = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
                self._active += tickets
            for ticket in tickets:
                self._begin(engine, ticket)
            if self._active:
                return True
            if self._closing and not self._waiting:
                return False

    def _is_idle(self) -> bool:
        return not self._active and not self._waiting and not self._closing

    def _begin(self, engine: Engine, ticket: Ticket) -> None:
        request = ticket.request
        try:
            self._running[ticket] = engine.begin(
                request.prompt_ids,
                request.config,
                constraint=None if request.constraint is None else request.constraint(),
            )
        except Exception as error:
            self._fail(ticket, error)

    def _drop_stopped(self) -> None:
        """End the waiting requests that were cancelled or whose time is over: they give their place free."""
        for ticket in [ticket for ticket in self._waiting if ticket.reason is not None]:
            self._waiting.remove(ticket)
            self._end(ticket, ticket.reason)

    def _advance(self, engine: Engine) -> None:
        """Drop the requests that should stop, then run one token of the others, or a piece of a prompt."""
        for ticket, running in list(self._running.items()):
            if ticket.reason is not None:
                engine.batch.cancel(running)
                self._end(ticket, ticket.reason)
        owners = {id(running): ticket for ticket, running in self._running.items()}
        try:
            for running, chunk in engine.batch.advance():
                self._deliver(owners[id(running)], chunk)
        except Exception as error:
            for ticket in list(self._running):
                self._fail(ticket, error)

    def _deliver(self, ticket: Ticket, chunk: Chunk | Exception) -> None:
        if isinstance(chunk, Exception):
            self._fail(ticket, chunk)
            return
        if self._observer is not None:
            self._observer.chunk(ticket, chunk)
        if chunk.result is not None:
            self._end(ticket, None, chunk.result.finish_reason)
        ticket.put(chunk)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        logger.error("a request failed", exc_info=error)
        self._end(ticket, GenerationFailed(f"the engine failed: {type(error).__name__}: {error}"))

    def _end(self, ticket: Ticket, error: ServingError | None, outcome: str = "") -> None:
        """Take a request out and tell of its end."""
        self._running.pop(ticket, None)
        with self._changed:
            if ticket in self._active:
                self._active.remove(ticket)
        if self._observer is not None:
            self._observer.ended(ticket, outcome if error is None else type(error).__name__)
        if error is not None:
            ticket.put(error)
