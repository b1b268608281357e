"""Carry a job out over HTTP: as one answer or as server-sent events, and stop when the client has gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from kairox_jax.engine import Chunk, GenerationResult, ServingError, Ticket, TokenLogprob
from kairox_jax.server.answers import Answer, usage
from kairox_jax.server.errors import from_serving
from kairox_jax.server.jobs import Job

logger = logging.getLogger("kairox")
CLIENT_GONE = 499  # nobody reads it; the log and the metrics do


def event(value: Any) -> str:
    """Write one server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"


async def respond_whole(request: Request, job: Job, tickets: list[Ticket], answer: Answer) -> Response:
    """Wait for all answers; give up when the client does.

    Raises:
        ServingError: one of them did not come to its end.
    """
    work = asyncio.ensure_future(asyncio.gather(*map(_collect, tickets)))
    gone = asyncio.ensure_future(_client_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=CLIENT_GONE)
        parts = work.result()
    finally:
        for ticket in tickets:
            ticket.cancel()
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
    results = [result for result, _ in parts]
    choices = [
        answer.choice(i, echo_of(job, i), result, logprobs) for i, (result, logprobs) in enumerate(parts)
    ]
    return JSONResponse(answer.whole(choices, usage(job.prompt_tokens, results)))


def respond_stream(job: Job, tickets: list[Ticket], answer: Answer, *, include_usage: bool) -> Response:
    """Stream all answers."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(
        _events(job, tickets, answer, include_usage), media_type="text/event-stream", headers=headers
    )


def echo_of(job: Job, index: int) -> str:
    """Return what goes before the answer ``index``."""
    return job.echoes[index * len(job.echoes) // len(job.requests)]


async def _events(job: Job, tickets: list[Ticket], answer: Answer, include_usage: bool) -> AsyncIterator[str]:
    more = {"usage": None} if include_usage else {}
    results: list[GenerationResult] = []
    chunks = _merged(tickets)
    try:
        for index in range(len(tickets)):
            if (first := answer.first(index, echo_of(job, index))) is not None:
                yield event(answer.part([first], **more))
        async for index, chunk in chunks:
            if chunk.text or chunk.logprobs:
                yield event(answer.part([answer.delta(index, chunk)], **more))
            if chunk.result is not None:
                results.append(chunk.result)
                yield event(answer.part([answer.last(index, chunk.result.finish_reason)], **more))
        if include_usage:
            yield event(answer.part([], usage=usage(job.prompt_tokens, results)))
        yield "data: [DONE]\n\n"
    except ServingError as error:
        yield event(from_serving(error).to_json())
    finally:
        for ticket in tickets:  # also when the client has gone
            ticket.cancel()
        await chunks.aclose()


async def _merged(tickets: list[Ticket]) -> AsyncGenerator[tuple[int, Chunk]]:
    """Yield the chunks of all tickets as they come, each with its ticket's index."""
    if len(tickets) == 1:
        async for chunk in tickets[0]:
            yield 0, chunk
        return
    arrived: asyncio.Queue[tuple[int, Chunk | ServingError]] = asyncio.Queue()

    async def pump(index: int, ticket: Ticket) -> None:
        try:
            async for chunk in ticket:
                arrived.put_nowait((index, chunk))
        except ServingError as error:
            arrived.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(index, ticket)) for index, ticket in enumerate(tickets)]
    running = len(tasks)
    try:
        while running:
            index, item = await arrived.get()
            if isinstance(item, ServingError):
                raise item
            running -= item.result is not None
            yield index, item
    finally:
        for task in tasks:
            task.cancel()


async def _collect(ticket: Ticket) -> tuple[GenerationResult, list[TokenLogprob]]:
    logprobs: list[TokenLogprob] = []
    async for chunk in ticket:
        logprobs += chunk.logprobs
        if chunk.result is not None:
            return chunk.result, logprobs
    raise RuntimeError("a ticket ended without a result")


async def _client_gone(request: Request) -> None:
    """Return when the client closes the connection; its body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
