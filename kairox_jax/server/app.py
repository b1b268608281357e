"""The routes: OpenAI's API, what tells of the server, and the page."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kairox_jax.engine import Engine, NotReady, Worker
from kairox_jax.server.answers import Answer, ChatAnswer, TextAnswer, token_name
from kairox_jax.server.errors import ApiError, ErrorBody, add_error_handlers
from kairox_jax.server.gate import Gate
from kairox_jax.server.jobs import Job, JobMaker
from kairox_jax.server.meter import Meter
from kairox_jax.server.props import model_record, props
from kairox_jax.server.respond import respond_stream, respond_whole
from kairox_jax.server.schema import ChatBody, DetokenizeBody, Sampling, TextBody, TokenizeBody
from kairox_jax.server.settings import ServerSettings

logger = logging.getLogger("kairox")
STATIC = Path(__file__).parent / "static"
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "The request cannot be carried out as written",
        401: "Missing or wrong API key",
        403: "Called by a name that is not the server's",
        404: "There is no such model",
        413: "The request is too large",
        429: "The queue is full",
        500: "An error of the server",
        503: "The model is still loading, or the server is shutting down",
        504: "The request took longer than the server allows; OpenAI's clients do not try again",
    }.items()
}

# Of what is generated; ``stream`` decides.
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer", "content": {"application/json": {}, "text/event-stream": {}}}
}


class Service:
    """The worker and what is made from its engine.

    Args:
        settings: the server's.
        open_engine: makes the engine, on the worker's thread.
    """

    def __init__(self, settings: ServerSettings, open_engine: Callable[[], Engine]) -> None:
        self.settings, self.meter, self.started = settings, Meter(), int(time.time())
        self._jobs: JobMaker | None = None

        def opened() -> Engine:
            engine = open_engine()
            self._jobs = JobMaker(settings, engine)
            self.meter.open(engine)
            return engine

        self.worker = Worker(opened, max_waiting=settings.max_waiting, observer=self.meter)
        self.meter.watch(self.worker)

    def jobs(self) -> JobMaker:
        """Return what makes jobs.

        Raises:
            NotReady: there is no engine yet, or no longer.
        """
        if self._jobs is None or self.worker.state != "ready":
            raise NotReady(f"the server is {self.worker.state}: try again later")
        return self._jobs

    async def carry_out(self, request: Request, body: Sampling, job: Job, answer: Answer) -> Response:
        """Queue a job and answer it."""
        tickets = self.worker.submit(job.requests, timeout_s=self.settings.timeout_s or None)
        if self.settings.log_prompts:
            logger.info("prompt: %s", json.dumps(body.model_dump(exclude_none=True), ensure_ascii=False))
        if body.stream:
            options = body.stream_options
            usage = options is not None and options.include_usage
            return respond_stream(job, tickets, answer, include_usage=usage)
        return await respond_whole(request, job, tickets, answer)


def make_app(service: Service) -> FastAPI:
    """Build the ASGI app around a service, which the caller starts and closes."""
    settings = service.settings
    # The documentation pages of FastAPI load scripts from elsewhere: only the document itself is served.
    app = FastAPI(title="kairox", version="1", docs_url=None, redoc_url=None, responses=ERRORS)
    add_error_handlers(app)
    _add_openai(app, service)
    _add_tokens(app, service)
    _add_state(app, service)
    _add_page(app)
    app.add_middleware(Gate, settings=settings, meter=service.meter)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    document = app.openapi
    app.openapi = lambda: _without_422(document())  # type: ignore[method-assign]
    return app


def _without_422(document: dict[str, Any]) -> dict[str, Any]:
    """Take FastAPI's own answer to wrong bodies out of the document: here it is 400, with another body."""
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document


def _add_openai(app: FastAPI, service: Service) -> None:
    settings = service.settings

    @app.post("/v1/chat/completions", responses=ANSWERS)
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """Continue a conversation."""
        job = await asyncio.to_thread(service.jobs().chat, body)
        answer = ChatAnswer(
            model=settings.model_name,
            tokenizer=service.worker.engine.tokenizer,
            with_logprobs=bool(body.logprobs),
        )
        return await service.carry_out(request, body, job, answer)

    @app.post("/v1/completions", responses=ANSWERS)
    async def completions(request: Request, body: TextBody) -> Response:
        """Continue texts."""
        job = await asyncio.to_thread(service.jobs().text, body)
        answer = TextAnswer(
            model=settings.model_name,
            tokenizer=service.worker.engine.tokenizer,
            with_logprobs=body.logprobs is not None,
        )
        return await service.carry_out(request, body, job, answer)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the one model."""
        return {"object": "list", "data": [model_record(settings, service.started)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Return one model."""
        if name != settings.model_name:
            raise ApiError(
                404, f"there is no model {name[:100]!r} here", param="model", code="model_not_found"
            )
        return model_record(settings, service.started)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Turn text into token ids."""
        tokenizer = service.worker.engine.tokenizer
        add_bos = None if body.add_special else False  # None does as the checkpoint says
        ids = await asyncio.to_thread(tokenizer.encode, body.content, add_bos=add_bos)
        if not body.with_pieces:
            return {"tokens": ids}
        return {"tokens": [{"id": i, "piece": token_name(tokenizer, i)} for i in ids]}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        """Turn token ids into text."""
        tokenizer = service.worker.engine.tokenizer
        try:
            return {"content": await asyncio.to_thread(tokenizer.decode, body.tokens)}
        except ValueError as error:
            raise ApiError(400, str(error), param="tokens", code="invalid_value") from error


def _add_state(app: FastAPI, service: Service) -> None:
    worker, meter = service.worker, service.meter

    @app.get("/health")
    async def health() -> JSONResponse:
        """Say whether requests are served: 200, else 503."""
        state = worker.state
        if state == "ready":
            return JSONResponse({"status": "ok"})
        raise ApiError(503, f"the server is {state}", code=state)

    @app.get("/props")
    async def server_props() -> dict[str, Any]:
        """Tell the actual placement and settings."""
        return props(service.settings, worker.engine)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Report Prometheus metrics."""
        return Response(generate_latest(meter.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/live")
    async def live(since: Annotated[int, Query(ge=-1, le=2**53)] = -1) -> dict[str, Any]:
        """Tell the last decode steps, after number ``since``, and what holds now."""
        return {
            "state": worker.state,
            "waiting": worker.num_waiting,
            "active": worker.num_active,
            **meter.live(since),
        }


def _add_page(app: FastAPI) -> None:
    app.mount("/static", StaticFiles(directory=STATIC), name="static")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> FileResponse:
        return FileResponse(STATIC / "icon.svg", media_type="image/svg+xml")
