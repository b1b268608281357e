"""From a request's body to what the worker runs: prompts, settings, constraints."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from kairox_jax.config import GenerationConfig
from kairox_jax.engine import Engine, JsonGrammars, Request
from kairox_jax.io import render_chat
from kairox_jax.server.errors import ApiError
from kairox_jax.server.schema import ChatBody, Sampling, SchemaFormat, TextBody
from kairox_jax.server.settings import ServerSettings

DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API; a chat may fill the context


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one HTTP request asks for.

    Attributes:
        requests: for the worker, all of the first prompt, then all of the second, and so on.
        echoes: the text that goes before each answer.
        prompt_tokens: of all prompts, each once.
    """

    requests: list[Request]
    echoes: list[str]
    prompt_tokens: int


class JobMaker:
    """Makes jobs for one engine.

    Args:
        settings: the server's.
        engine: the model.
    """

    def __init__(self, settings: ServerSettings, engine: Engine) -> None:
        self._settings, self._engine = settings, engine
        self._grammars: JsonGrammars | None = None
        self._lock = Lock()

    def chat(self, body: ChatBody) -> Job:
        """Make the job of a chat.

        Raises:
            ApiError: it cannot be carried out; the message says why.
        """
        tokenizer = self._engine.tokenizer
        messages = [
            {"role": "system" if message.role == "developer" else message.role, "content": message.text}
            | ({} if message.name is None else {"name": message.name})
            for message in body.messages
        ]
        try:
            text = render_chat(
                self._engine.chat_template,
                messages,
                bos=tokenizer.token_text(tokenizer.bos_id),
                eos=tokenizer.token_text(next(iter(tokenizer.eos_ids), None)),
            )
        except ValueError as error:
            hint = "" if self._engine.chat_template else "; over HTTP, use /v1/completions"
            raise ApiError(400, f"{error}{hint}", param="messages", code="invalid_value") from error
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return self._make(body, [tokenizer.encode(text)], limit, logprobs, [""])

    def text(self, body: TextBody) -> Job:
        """Make the job of a completion; see ``chat``."""
        tokenizer, prompt = self._engine.tokenizer, body.prompt
        parts: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)
        prompts = [tokenizer.encode(part) if isinstance(part, str) else part for part in parts]
        echoes = [""] * len(parts)
        limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        made = self._make(body, prompts, limit, body.logprobs, echoes)  # checks ids before they are decoded
        if not body.echo:
            return made
        echoes = [part if isinstance(part, str) else tokenizer.decode(part) for part in parts]
        return Job(requests=made.requests, echoes=echoes, prompt_tokens=made.prompt_tokens)

    def _make(
        self,
        body: Sampling,
        prompts: list[list[int]],
        limit: int | None,
        logprobs: int | None,
        echoes: list[str],
    ) -> Job:
        self._check_model(body.model)
        count = body.n or 1
        if count * len(prompts) > self._settings.max_waiting:
            raise ApiError(
                400,
                f"n {count} with {len(prompts)} prompts asks for {count * len(prompts)} answers, and the queue "
                f"takes {self._settings.max_waiting}: ask for fewer at once",
                param="n" if count > 1 else "prompt",
                code="invalid_value",
            )
        constraint = self._constraint(body)
        requests = []
        for prompt in prompts:
            config = self._config(body, limit, logprobs)
            self._check(prompt, config, "messages" if isinstance(body, ChatBody) else "prompt")
            requests += Request(prompt_ids=tuple(prompt), config=config, constraint=constraint).copies(count)
        return Job(requests=requests, echoes=echoes, prompt_tokens=sum(map(len, prompts)))

    def _config(self, body: Sampling, limit: int | None, logprobs: int | None) -> GenerationConfig:
        defaults, seed = self._settings.defaults, body.seed
        if seed is None:
            seed = secrets.randbelow(2**31) if self._settings.seed is None else self._settings.seed
        stop = body.stop if body.stop is not None else list(defaults.stop)
        try:
            return GenerationConfig(
                max_tokens=self._engine.context_length if limit is None else limit,
                temperature=_given(body.temperature, defaults.temperature),
                top_k=_given(body.top_k, defaults.top_k),
                top_p=_given(body.top_p, defaults.top_p),
                min_p=_given(body.min_p, defaults.min_p),
                presence_penalty=body.presence_penalty or 0.0,
                frequency_penalty=body.frequency_penalty or 0.0,
                logit_bias={int(key): value for key, value in (body.logit_bias or {}).items()},
                logprobs=logprobs,
                seed=seed,
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                ignore_eos=bool(body.ignore_eos),
            )
        except ValueError as error:
            raise ApiError(400, str(error), param=str(error).split()[0], code="invalid_value") from error

    def _check(self, prompt: list[int], config: GenerationConfig, field: str) -> None:
        try:
            self._engine.check_request(prompt, replace(config, logit_bias={}))
        except ValueError as error:
            too_long = len(prompt) >= self._engine.context_length
            code = "context_length_exceeded" if too_long else "invalid_value"
            raise ApiError(400, str(error), param=field, code=code) from error
        try:
            self._engine.check_request(prompt, config)
        except ValueError as error:
            raise ApiError(400, f"logit_bias: {error}", param="logit_bias", code="invalid_value") from error

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._settings.model_name:
            raise ApiError(
                404,
                f"there is no model {name[:100]!r} here: use {self._settings.model_name!r}, or leave it out",
                param="model",
                code="model_not_found",
            )

    def _constraint(self, body: Sampling) -> Callable[[], Any] | None:
        form = body.response_format
        if form is None or form.type == "text":
            return None
        schema = form.json_schema.schema_ if isinstance(form, SchemaFormat) else None
        try:
            with self._lock:  # built once, when it is first asked for
                if self._grammars is None:
                    self._grammars = JsonGrammars(self._engine.tokenizer, self._engine.config.vocab_size)
            return self._grammars.constraint(schema).copy
        except ValueError as error:
            raise ApiError(
                400, f"response_format: {error}", param="response_format", code="invalid_value"
            ) from error


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
