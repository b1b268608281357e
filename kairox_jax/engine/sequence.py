"""One request while it runs: its draws, counts, text and end. Knows no model, no clock and no thread.

Whoever has a row of logits feeds it in; so one step of a model may serve one sequence or many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Ids
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float, Int

from kairox_jax.config import GenerationConfig
from kairox_jax.engine.results import TokenLogprob
from kairox_jax.engine.sampling import adjust, make_rng, sample, token_logprob, token_logprobs
from kairox_jax.engine.text import TextStream
from kairox_jax.io import Tokenizer


class Constraint(Protocol):
    """What may come next, for output that must have a form; see ``constrained.py``."""

    def allowed(self) -> Bool[np.ndarray, " V"]:
        """Return which tokens may come next, at least one of them."""
        ...

    def accept(self, token_id: int) -> None:
        """Take the token that came."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing more may come."""
        ...


class Sequence:
    """The state of one generation.

    Args:
        prompt_ids: the prompt's tokens.
        config: how to choose tokens and when to stop.
        tokenizer: of the model.
        room: the most tokens that the context leaves.
        constraint: restricts the tokens, or None.
    """

    def __init__(
        self,
        prompt_ids: Ids[int],
        config: GenerationConfig,
        tokenizer: Tokenizer,
        *,
        room: int,
        constraint: Constraint | None = None,
    ) -> None:
        self.prompt_ids, self.config = list(prompt_ids), config
        self.token_ids: list[int] = []
        self.room = min(config.max_tokens, room)
        self.finish_reason = "length" if self.room <= 0 else None
        self._end_ids = frozenset() if config.ignore_eos else frozenset(tokenizer.eos_ids)
        self._rng = make_rng(config.seed)
        self._counts: Counter[int] = Counter()
        self._text = TextStream(tokenizer.token_bytes, config.stop)
        self._constraint = constraint
        self._logprobs: list[TokenLogprob] = []

    @property
    def text(self) -> str:
        """The text shown so far."""
        return self._text.text

    @property
    def next_position(self) -> int:
        """Where the token that came last stands in the context."""
        return len(self.prompt_ids) + len(self.token_ids) - 1

    def feed(self, logits: Float[np.ndarray, " V"]) -> tuple[int, str] | None:
        """Choose the next token.

        Args:
            logits: after the tokens so far; not kept.

        Returns:
            The token and the text that may be shown now, or None at an end-of-sequence token. Look at
            ``finish_reason`` afterwards: where it is set, no more logits are needed.

        Raises:
            ValueError: the sequence has ended.
            FloatingPointError: a logit is NaN or infinite.
        """
        if self.finish_reason is not None:
            raise ValueError(f"the sequence has ended ({self.finish_reason}): start a new one")
        token = self._choose(logits)
        if token in self._end_ids:
            self.finish_reason = "stop"
            return None
        self.token_ids.append(token)
        self._counts[token] += 1
        if self.config.logprobs is not None:
            self._logprobs.append(self._logprob(logits, token, self.config.logprobs))
        piece = self._text.push(token)
        if self._constraint is not None:
            self._constraint.accept(token)
        if self._text.stopped or (self._constraint is not None and self._constraint.finished):
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.room:
            self.finish_reason = "length"
        return token, piece

    def flush(self) -> str:
        """End the text and return what was held back as a possible stop text."""
        return self._text.flush()

    def take_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Return those of the tokens whose text begins in what has been shown; each is given once.

        Tokens of a stop text are never given. A token without text comes with the text after it.
        """
        shown = self._text.num_shown
        ready = [entry for entry in self._logprobs if entry.offset < shown]
        if self.finish_reason is not None and not self._text.stopped:
            ready = self._logprobs
        self._logprobs = self._logprobs[len(ready) :]
        return tuple(ready)

    def _choose(self, logits: Float[np.ndarray, " V"]) -> int:
        adjusted = adjust(logits, self.config, self._counts)
        if self._constraint is None:
            return sample(adjusted, self.config, self._rng)
        ids: Int[np.ndarray, " n"] = np.flatnonzero(self._constraint.allowed()[: len(logits)])
        return int(ids[sample(adjusted[ids], self.config, self._rng)])

    def _logprob(self, logits: Float[np.ndarray, " V"], token: int, count: int) -> TokenLogprob:
        top: tuple[tuple[int, float], ...] = ()
        if count:
            ids, values = token_logprobs(logits, min(count, logits.size))
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        value = dict(top).get(token)
        return TokenLogprob(
            token_id=token,
            logprob=token_logprob(logits, token) if value is None else value,
            top=top,
            offset=self._text.num_known,
        )
