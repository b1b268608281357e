"""What a generation gives: pieces of text as they come, and the finished result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kairox_jax.engine.statistics import Statistics


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """A finished generation.

    Attributes:
        text: what was generated, without the stop text.
        prompt_token_ids, token_ids: ids of the prompt and of the generated text (no end-of-sequence token).
        finish_reason: "stop" (end of sequence, or a stop text) or "length".
        stats: counts and times.
    """

    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    stats: Statistics

    def to_json(self) -> dict[str, Any]:
        """Return everything as one JSON object."""
        return {
            "text": self.text,
            "prompt_token_ids": self.prompt_token_ids,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            **self.stats.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of streamed text; the last one carries the result."""

    text: str
    token_id: int | None = None
    result: GenerationResult | None = None
