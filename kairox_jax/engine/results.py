"""What a generation gives: pieces of text as they come, and the finished result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kairox_jax.engine.hybrid import StepCounts
from kairox_jax.engine.statistics import Statistics


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """A finished generation.

    Attributes:
        text: what was generated, without the stop text.
        prompt_token_ids, token_ids: ids of the prompt and of the generated text (no end-of-sequence token).
        finish_reason: "stop" (end of sequence, or a stop text), "length" or "cancelled".
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
class TokenLogprob:
    """How probable the model found a token.

    Attributes:
        token_id: the token.
        logprob: its log-probability in nats, of the model's own distribution (no filter, temperature 1).
        top: the most probable tokens and their log-probabilities, as many as were asked for.
        offset: characters of the generated text before the token.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of streamed text; the last one carries the result.

    Attributes:
        text: whole characters, no part of a stop text; empty while such are held back.
        token_id: the token that came; None in the last chunk.
        logprobs: of the tokens whose text has been shown by now, each once.
        step: what the decode step before this token did; None where it came from the prefill.
        result: everything, in the last chunk.
    """

    text: str
    token_id: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    step: StepCounts | None = None
    result: GenerationResult | None = None
