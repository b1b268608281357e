"""What every request passes: host and key checks, the size limit, headers of the answer, the log's line."""

from __future__ import annotations

import hmac
import logging
import secrets
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kairox_jax.server.errors import ApiError
from kairox_jax.server.meter import Meter
from kairox_jax.server.settings import ServerSettings

logger = logging.getLogger("kairox")

OPEN_PATHS = ("/", "/health", "/favicon.ico")  # and /static/: the page asks for the key itself
ROUTINE_PATHS = ("/live", "/health", "/metrics", "/static/")  # asked every second: not worth a line
HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class Gate:
    """ASGI middleware around the whole app.

    Args:
        app: what comes behind it.
        settings: key, host names and limits.
        meter: counts requests.
    """

    def __init__(self, app: ASGIApp, *, settings: ServerSettings, meter: Meter) -> None:
        self._app, self._settings, self._meter = app, settings, meter
        self._headers = dict(HEADERS)
        if settings.cors_origins:
            del self._headers["cross-origin-resource-policy"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's event stream."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = perf_counter(), 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = {**self._headers, "x-request-id": request_id}
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in own.items()),
                ]
            await send(message)

        request_id = f"req-{secrets.token_hex(8)}"
        try:
            self._check_host(scope)
            self._check_key(scope)
            await self._app(scope, await self._read_body(scope, receive), send_on)
        except ApiError as error:
            await error.response()(scope, receive, send_on)
        except Exception as error:
            logger.exception("%s %s failed", scope["method"], scope["path"][:200])
            if status:  # the answer has begun: cutting it off is all that is left
                raise
            await ApiError(500, f"internal error: {type(error).__name__}; see the server's log").response()(
                scope, receive, send_on
            )
        finally:
            route = getattr(scope.get("route"), "path", "(none)")
            self._meter.requests.labels(route, status).inc()
            ms = (perf_counter() - begin) * 1e3
            level = logging.DEBUG if scope["path"].startswith(ROUTINE_PATHS) else logging.INFO
            logger.log(level, "%s %s %d %.0f ms", scope["method"], route, status, ms)

    def _check_host(self, scope: Scope) -> None:
        names = self._settings.host_names
        host = _header(scope, b"host").decode("latin-1").lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if names is not None and name not in names:
            raise ApiError(
                403,
                "this server answers to its local names only: add the name with --allow-host",
                code="host",
            )

    def _check_key(self, scope: Scope) -> None:
        key = self._settings.api_key
        path = scope["path"]
        if key is None or path in OPEN_PATHS or path.startswith("/static/") or scope["method"] == "OPTIONS":
            return
        scheme, _, given = _header(scope, b"authorization").partition(b" ")
        right = hmac.compare_digest(
            given.strip(), key.encode()
        )  # takes as long for a near miss as for a far one
        if scheme.lower() != b"bearer" or not right:
            raise ApiError(
                401, "missing or wrong API key: send Authorization: Bearer KEY", code="invalid_api_key"
            )

    async def _read_body(self, scope: Scope, receive: Receive) -> Receive:
        """Read the whole body, unless it is too large, and return a ``receive`` that gives it once."""
        limit, parts, size, more = self._settings.max_body_bytes, [], 0, True
        length = _header(scope, b"content-length")
        if length.isdigit() and int(length) > limit:
            raise self._too_large()
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return _replay(message, receive)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise self._too_large()
            more = message.get("more_body", False)
        return _replay({"type": "http.request", "body": b"".join(parts), "more_body": False}, receive)

    def _too_large(self) -> ApiError:
        limit = self._settings.max_body_bytes
        return ApiError(413, f"the request is larger than {limit} bytes: shorten it, or raise --max-body")


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _replay(message: Message, receive: Receive) -> Receive:
    """Return a ``receive`` that gives ``message`` first, and then what comes."""
    pending = [message]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
