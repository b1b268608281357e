"""Errors in the shape of OpenAI's API, whatever raised them."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from kairox_jax.engine import Interrupted, NotReady, QueueFull, ServingError, TimedOut

TYPES = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}
TEXTS = {404: "there is no {method} {path} here", 405: "{path} does not take {method}"}
# Names of union branches in the location of a pydantic error, as in ("body", "prompt", "list[str]", 0).
_TYPES = ("str", "int", "float", "bool", "nullable")
_BRANCHES = ("list[", "dict[", "function-", "constrained-")
# What to write instead of a field that another route has.
_ELSEWHERE = {
    (
        "/v1/completions",
        "max_completion_tokens",
    ): "it belongs to /v1/chat/completions; here the limit is max_tokens",
    ("/v1/completions", "messages"): "it belongs to /v1/chat/completions; here the text is prompt",
    ("/v1/completions", "top_logprobs"): "it belongs to /v1/chat/completions; here logprobs is their number",
    ("/v1/chat/completions", "prompt"): "it belongs to /v1/completions; here the text is in messages",
    ("/v1/chat/completions", "echo"): "it belongs to /v1/completions",
}
# Of fields with several forms, where pydantic reports each form's own error.
_FORMS = {
    "prompt": "expected a text, a list of texts, a list of token ids, or a list of such lists, none of them empty",
    "stop": "expected a text or a list of at most 16 texts, none of them empty",
    "content": 'expected a text, or a list of {"type": "text", "text": ...}; only text is supported',
}


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer with an error.

    Args:
        status: of HTTP.
        message: one line with the remedy.
        param: the field that is wrong.
        code: a word for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_json(self) -> dict[str, Any]:
        """Return the body."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        detail = ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)
        return {"error": detail.model_dump()}

    def response(self) -> JSONResponse:
        """Return the answer."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == 504:
            headers["X-Should-Retry"] = "false"  # OpenAI's clients would ask for the same long work again
        return JSONResponse(self.to_json(), status_code=self.status, headers=headers)


def from_serving(error: ServingError) -> ApiError:
    """Say an error of the worker as an answer."""
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, TimedOut):
        return ApiError(504, str(error), code="timeout")
    if isinstance(error, NotReady):
        return ApiError(503, str(error), code="not_ready")
    if isinstance(error, Interrupted):
        return ApiError(503, str(error), code="shutting_down")
    return ApiError(500, str(error), code=type(error).__name__)


def from_validation(errors: Any, route: str = "") -> ApiError:
    """Say the first of pydantic's errors in one line; never with the input, which may be a secret or huge."""
    # A field of another route explains the lack of this one's.
    errors = sorted(errors, key=lambda each: (route, each["loc"][-1]) not in _ELSEWHERE)
    error = errors[0]
    where = [part for part in error["loc"] if part not in ("body", "query", "path")]
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {error['ctx']['error']}", code="invalid_json")
    path = ""
    for part in where:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _TYPES and not part.startswith(_BRANCHES):
            path += f".{part}" if path else part
    path = path[:200].encode("ascii", "backslashreplace").decode()
    if error["type"] == "extra_forbidden":
        remedy = _ELSEWHERE.get((route, path), "leave it out")
        return ApiError(
            400, f"unknown or unsupported field {path!r}: {remedy}", param=path, code="unknown_field"
        )
    if (
        not path and error["type"] == "value_error"
    ):  # fields that do not go together: the text begins with one
        text = str(error["ctx"]["error"])
        return ApiError(400, text, param=re.split(r"\W", text)[0], code="invalid_value")
    if not path:
        return ApiError(
            400,
            f"the body must be a JSON object with Content-Type application/json: {error['msg']}",
            code="invalid_json",
        )
    if path.startswith("logit_bias.") and where[-1] == "[key]":
        text = "logit_bias: its names are token ids in digits, of at most 9"
        return ApiError(400, text, param="logit_bias", code="invalid_value")
    form = next((_FORMS[part] for part in where if part in _FORMS), None)
    if form is not None and error["type"] != "string_unicode":
        return ApiError(400, f"{path}: {form}", param=path, code="invalid_value")
    return ApiError(400, f"{path}: {error['msg']}", param=path, code="invalid_value")


def add_error_handlers(app: FastAPI) -> None:
    """Let every error of an app come out in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        del request
        return error.response()

    @app.exception_handler(ServingError)
    async def serving_error(request: Request, error: ServingError) -> JSONResponse:
        del request
        return from_serving(error).response()

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return from_validation(error.errors(), request.url.path).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        text = TEXTS.get(error.status_code, str(error.detail))
        message = text.format(method=request.method, path=request.url.path[:200])
        answer = ApiError(error.status_code, message).response()
        answer.headers.update(error.headers or {})
        return answer
