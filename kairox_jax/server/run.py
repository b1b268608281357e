"""Listen, load in the background, and shut down so that every stream has an end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from kairox_jax.engine import Engine
from kairox_jax.server.app import Service, make_app
from kairox_jax.server.settings import ServerSettings

logger = logging.getLogger("kairox")
LAST_EVENTS_S = 5.0  # for the last events of interrupted streams to leave


class _Server(uvicorn.Server):
    """Closes the worker, and with it the streams, while uvicorn waits for them."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal; it is not raised again afterwards, so that the process ends as it should."""
        del sig, frame
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End streams within the grace time; a second signal ends them at once."""
        settings, worker = self._service.settings, self._service.worker
        logger.info(
            "closing: running requests may take up to %g s; Ctrl-C again ends them now", settings.grace_s
        )
        drained = asyncio.ensure_future(
            asyncio.to_thread(worker.close, finish=True, grace_s=settings.grace_s, patience_s=LAST_EVENTS_S)
        )
        forced = asyncio.ensure_future(self._forced())
        await asyncio.wait({drained, forced}, return_when=asyncio.FIRST_COMPLETED)
        if not drained.done():
            await asyncio.to_thread(worker.close, finish=False, patience_s=1.0)
        forced.cancel()
        await super().shutdown(sockets)

    async def _forced(self) -> None:
        while not self.force_exit:
            await asyncio.sleep(0.1)


def serve(settings: ServerSettings, open_engine: Callable[[], Engine]) -> None:
    """Serve until a signal ends it.

    Args:
        settings: where to listen, and the limits.
        open_engine: makes the engine; called on the worker's thread while the server listens already.

    Raises:
        OSError: the address cannot be listened on.
        Exception: what kept the model from loading.
    """
    service = Service(settings, open_engine)
    listener = _listen(settings)
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        make_app(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=int(LAST_EVENTS_S),
        h11_max_incomplete_event_size=64 * 1024,
    )
    server = _Server(config, service)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    logger.info("listening on http://%s:%d (the API is under /v1)", host, port)
    service.worker.start()
    asyncio.run(_serve(server, service, listener))
    _finish(service)


async def _serve(server: _Server, service: Service, listener: socket.socket) -> None:
    """Run the server; end it where the model cannot be loaded."""

    async def watch_loading() -> None:
        if await asyncio.to_thread(service.worker.wait_ready):
            logger.info("ready: %s", service.settings.model_name)
        elif service.worker.error is not None:
            server.should_exit = True

    watcher = asyncio.create_task(watch_loading())
    await server.serve(sockets=[listener])
    watcher.cancel()


def _listen(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen()
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ValueError(
            f"cannot listen on {settings.host}:{settings.port}: {reason}; choose another --port"
        ) from None
    return listener


def _finish(service: Service) -> None:
    """Raise what kept the model from loading; leave a thread that cannot be interrupted behind."""
    error = service.worker.error
    if error is not None:
        raise error
    if not service.worker.close(finish=False, patience_s=LAST_EVENTS_S):
        # Loading and compiling cannot be interrupted, and Python would crash when it ends beside them.
        logger.warning("ended while the model was still loading")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
