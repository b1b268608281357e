"""What OpenAI's API answers: whole objects and the chunks of a stream, for chats and completions."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from kairox_jax.engine import Chunk, GenerationResult, TokenLogprob
from kairox_jax.io import Tokenizer


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text; one that is only a part of a character is written as ``bytes:\\xf0\\x9f``."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode() if data else tokenizer.token_text(token_id)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def usage(prompt_tokens: int, results: list[GenerationResult]) -> dict[str, Any]:
    """Count the tokens of an answer; a prompt counts once, however many answers it got."""
    completion = sum(len(result.token_ids) for result in results)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": results[0].stats.reused_tokens if results else 0},
    }


@dataclass(kw_only=True)
class Answer:
    """One answer in the making; ``ChatAnswer`` and ``TextAnswer`` give it its form.

    Attributes:
        model: name of the model.
        tokenizer: of the model, for the names of tokens.
        with_logprobs: whether the client asked for them.
    """

    model: str
    tokenizer: Tokenizer
    with_logprobs: bool
    created: int = field(default_factory=lambda: int(time.time()))
    kind = ""
    chunk_kind = ""
    prefix = ""

    def __post_init__(self) -> None:
        self.answer_id = f"{self.prefix}-{secrets.token_hex(12)}"

    def whole(self, choices: list[dict[str, Any]], counts: dict[str, Any]) -> dict[str, Any]:
        """Return the object of an answer that is not streamed."""
        return self._envelope(self.kind, choices) | {"usage": counts}

    def part(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return the object of one chunk."""
        return self._envelope(self.chunk_kind, choices) | more

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def choice(self, index: int, echo: str, result: GenerationResult, logprobs: list[TokenLogprob]) -> Any:
        """Return a finished choice."""
        raise NotImplementedError

    def first(self, index: int, echo: str) -> Any | None:
        """Return the choice of a stream's first chunk, or None."""
        raise NotImplementedError

    def delta(self, index: int, chunk: Chunk) -> Any:
        """Return the choice of a chunk with text."""
        raise NotImplementedError

    def last(self, index: int, reason: str) -> Any:
        """Return the choice of a stream's last chunk."""
        raise NotImplementedError


class ChatAnswer(Answer):
    """chat.completion."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, index: int, echo: str, result: GenerationResult, logprobs: list[TokenLogprob]) -> Any:
        """Return a finished choice."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": echo + result.text, "refusal": None},
            "logprobs": self._logprobs(logprobs) if self.with_logprobs else None,
            "finish_reason": result.finish_reason,
        }

    def first(self, index: int, echo: str) -> Any | None:
        """Return the choice that names the role."""
        return _chat_delta(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, chunk: Chunk) -> Any:
        """Return the choice of a chunk with text."""
        choice = _chat_delta(index, {"content": chunk.text})
        if self.with_logprobs:
            choice["logprobs"] = self._logprobs(chunk.logprobs)
        return choice

    def last(self, index: int, reason: str) -> Any:
        """Return the choice of a stream's last chunk."""
        return _chat_delta(index, {}, reason)

    def _logprobs(self, entries: tuple[TokenLogprob, ...] | list[TokenLogprob]) -> dict[str, Any]:
        content = [
            self._token(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._token(token, value) for token, value in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token_id)
        return {"token": token_name(self.tokenizer, token_id), "logprob": logprob, "bytes": list(data)}


class TextAnswer(Answer):
    """text_completion."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def choice(self, index: int, echo: str, result: GenerationResult, logprobs: list[TokenLogprob]) -> Any:
        """Return a finished choice."""
        return self._choice(index, echo + result.text, logprobs, result.finish_reason)

    def first(self, index: int, echo: str) -> Any | None:
        """Return the choice with the echoed prompt, where it was asked for."""
        return self._choice(index, echo, []) if echo else None

    def delta(self, index: int, chunk: Chunk) -> Any:
        """Return the choice of a chunk with text."""
        return self._choice(index, chunk.text, chunk.logprobs)

    def last(self, index: int, reason: str) -> Any:
        """Return the choice of a stream's last chunk."""
        return self._choice(index, "", [], reason)

    def _choice(
        self,
        index: int,
        text: str,
        entries: tuple[TokenLogprob, ...] | list[TokenLogprob],
        reason: str | None = None,
    ) -> dict[str, Any]:
        logprobs = self._logprobs(entries) if self.with_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, entries: tuple[TokenLogprob, ...] | list[TokenLogprob]) -> dict[str, Any]:
        names = [token_name(self.tokenizer, entry.token_id) for entry in entries]
        return {
            "tokens": names,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {token_name(self.tokenizer, token): value for token, value in entry.top} for entry in entries
            ],
            "text_offset": [entry.offset for entry in entries],
        }


def _chat_delta(index: int, delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
