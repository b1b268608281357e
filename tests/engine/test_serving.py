"""The worker on the tiny model: order, limits, cancellation between tokens and pieces, timeouts, closing."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from tiny_model import GREEDY, tiny_engine

from kairox_jax.config import GenerationConfig
from kairox_jax.engine import (
    Cancelled,
    GenerationFailed,
    Interrupted,
    NotReady,
    QueueFull,
    Request,
    TimedOut,
    Worker,
    host_prefill,
)

LONG = GenerationConfig(max_tokens=200, temperature=0, ignore_eos=True)


class Watch:
    """Hears of every token; may hold the worker before one."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.tokens = 0
        self.gate = threading.Event()
        self.gate.set()

    def chunk(self, ticket: Any, chunk: Any) -> None:
        assert self.gate.wait(30)
        self.tokens += chunk.token_id is not None

    def ended(self, ticket: Any, outcome: str) -> None:
        self.outcomes.append(outcome)


def request(config: GenerationConfig = GREEDY, ids: tuple[int, ...] = (5, 6, 7)) -> Request:
    return Request(prompt_ids=ids, config=config)


@contextmanager
def working(**settings: Any) -> Iterator[tuple[Worker, Watch]]:
    watch = Watch()
    with ExitStack() as stack:
        worker = Worker(
            lambda: stack.enter_context(tiny_engine(context_length=256)), observer=watch, **settings
        )
        worker.start()
        assert worker.wait_ready(60), worker.error
        try:
            yield worker, watch
        finally:
            watch.gate.set()
            assert worker.close(finish=False)


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Worker, Watch]]:
    with working(max_waiting=2) as made:
        yield made


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def read(ticket: Any) -> Any:
    return list(ticket)[-1].result


def test_the_worker_gives_what_the_engine_gives(shared):
    worker, _ = shared
    with tiny_engine(context_length=256) as engine:
        want = engine.generate([5, 6, 7], GREEDY)
    got = [read(ticket) for ticket in worker.submit([request()] * 2)]
    assert [result.token_ids for result in got] == [want.token_ids] * 2
    assert got[1].stats.reused_tokens == 2

    async def read_async() -> list[Any]:
        (ticket,) = worker.submit([request()])
        return [chunk async for chunk in ticket]

    chunks = asyncio.run(read_async())
    assert [chunk.token_id for chunk in chunks[:-1]] == want.token_ids == chunks[-1].result.token_ids


def test_cancelling_stops_within_one_token(shared):
    worker, watch = shared
    (ticket,) = worker.submit([request(LONG)])
    chunks = iter(ticket)
    for _ in range(3):
        next(chunks)
    watch.gate.clear()
    ticket.cancel()
    at = watch.tokens
    watch.gate.set()
    with pytest.raises(Cancelled):
        list(chunks)
    assert watch.tokens <= at + 2 and watch.outcomes[-1] == "Cancelled"  # the held token, and one on its way
    assert read(worker.submit([request()])[0]).finish_reason == "length"


def test_cancelling_stops_between_the_pieces_of_a_prompt(monkeypatch):
    monkeypatch.setattr(host_prefill, "MOST_TOKENS", 64)
    ids = [5, 6, 7] * 66
    with tiny_engine(context_length=256) as engine:
        pieces: list[int] = []
        together = engine._hybrid.prefill.together  # type: ignore[union-attr]
        engine._hybrid.prefill.together = lambda new: (pieces.append(new[0].start), together(new))[1]  # type: ignore
        (last,) = engine.stream(ids, GREEDY, cancelled=lambda: len(pieces) == 1)
        assert pieces == [0] and last.result is not None and last.result.finish_reason == "cancelled"
        pieces.clear()
        result = engine.generate(ids, GREEDY, reuse=True)
        assert pieces == [64, 128, 192] and result.stats.reused_tokens == 64  # the piece that was done counts
        again = engine.generate(ids, GREEDY)
        assert again.token_ids == result.token_ids


def test_the_queue_is_bounded_and_takes_all_or_none(shared):
    worker, watch = shared
    watch.gate.clear()
    running = worker.submit([request(LONG)])
    wait_until(lambda: worker.num_active == 1)
    waiting = worker.submit([request()])
    with pytest.raises(QueueFull, match="1 requests wait and at most 2"):
        worker.submit([request(), request()])
    waiting += worker.submit([request()])
    waiting[0].cancel()
    (late,) = worker.submit([request()])  # the cancelled one gave its place free
    watch.gate.set()
    for ticket in running:
        ticket.cancel()
    with pytest.raises(Cancelled):
        list(waiting[0])
    assert read(waiting[1]).token_ids == read(late).token_ids


def test_a_timeout_counts_the_waiting(shared):
    worker, watch = shared
    watch.gate.clear()
    (running,) = worker.submit([request(LONG)], timeout_s=0.2)
    wait_until(lambda: worker.num_active == 1)
    (waiting,) = worker.submit([request()], timeout_s=0.1)
    with pytest.raises(TimedOut, match="longer than 0.1 s"):
        list(waiting)

    async def read_async() -> None:
        async for _ in running:
            pass

    with pytest.raises(TimedOut, match="longer than 0.2 s"):
        asyncio.run(read_async())
    watch.gate.set()
    assert read(worker.submit([request()])[0]).finish_reason == "length"


def test_requests_that_cannot_be_served_are_refused_at_once(shared):
    worker, _ = shared
    for wrong, message in (
        (request(ids=()), "no tokens"),
        (request(ids=(5,) * 300), "300 tokens, the context holds 256"),
        (request(ids=(999,)), "token id 999"),
        (request(GenerationConfig(logit_bias={999: 1})), "token id 999"),
    ):
        with pytest.raises(ValueError, match=message):
            worker.submit([request(), wrong])
    assert worker.num_waiting == 0


def test_an_error_of_the_engine_ends_only_its_request(shared, caplog):
    worker, watch = shared

    def broken() -> Any:
        raise RuntimeError("no such rule")

    (ticket,) = worker.submit([Request(prompt_ids=(5,), config=GREEDY, constraint=broken)])
    with pytest.raises(GenerationFailed, match="no such rule"):
        list(ticket)
    assert watch.outcomes[-1] == "GenerationFailed" and "no such rule" in caplog.text
    assert read(worker.submit([request()])[0]).finish_reason == "length"


def test_copies_take_the_seeds_that_follow():
    made = request(GenerationConfig(seed=7)).copies(3)
    assert [each.config.seed for each in made] == [7, 8, 9]


@pytest.mark.parametrize("finish", [True, False])
def test_closing_gives_every_request_an_end(finish):
    with working() as (worker, watch):
        watch.gate.clear()
        tickets = worker.submit([request(LONG), request()])
        wait_until(lambda: worker.num_active == 1)
        closer = threading.Thread(target=worker.close, kwargs={"finish": finish, "grace_s": 30})
        closer.start()
        wait_until(lambda: worker.state == "closing")
        with pytest.raises(NotReady, match="closing"):
            worker.submit([request()])
        if not finish:
            wait_until(lambda: tickets[1].reason is not None)
        watch.gate.set()
        for ticket in tickets:
            if finish:
                assert read(ticket).finish_reason == "length"
            else:
                with pytest.raises(Interrupted, match="shutting down"):
                    list(ticket)
        closer.join(30)
        assert not closer.is_alive()


def test_an_engine_that_cannot_be_opened():
    def fails() -> Any:
        raise ValueError("no such model")

    worker = Worker(fails)
    worker.start()
    assert not worker.wait_ready(10) and worker.state == "failed"
    assert str(worker.error) == "no such model"
    with pytest.raises(NotReady, match="failed"):
        worker.submit([request()])
    assert worker.close(finish=True)
    with pytest.raises(ValueError, match="max_waiting 0"):
        Worker(fails, max_waiting=0)
