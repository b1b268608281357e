"""Output that must have a form: JSON, or JSON by a schema, through the llguidance library (optional)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from jaxtyping import Bool

from kairox_jax.io import Tokenizer

REMEDY = "pip install 'kairox-jax[server]'"


class JsonGrammars:
    """Makes constraints for one model; holds its vocabulary in the library's form.

    Args:
        tokenizer: of the model.
        vocab_size: V of the logits, which may exceed the tokenizer's.

    Raises:
        ValueError: the library is not installed, or the model names no end-of-sequence token.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ValueError(f"constrained output needs the package llguidance: {REMEDY}") from error
        if not tokenizer.eos_ids:
            raise ValueError("constrained output needs an end-of-sequence token, and this model names none")
        self._vocab_size = vocab_size
        self._library = llguidance
        wrapped = llguidance.TokenizerWrapper(_Vocabulary(tokenizer))
        self._vocabulary = llguidance.LLTokenizer(
            wrapped, n_vocab=vocab_size, eos_token=list(tokenizer.eos_ids)
        )

    def constraint(self, schema: dict[str, Any] | None) -> JsonConstraint:
        """Make the constraint of one request.

        Args:
            schema: JSON Schema of the text; None takes any JSON object.

        Raises:
            ValueError: the schema is wrong, or says what the library does not support; the message has its reason.
        """
        matcher = self._library.LLMatcher
        grammar = matcher.grammar_from_json_schema(
            json.dumps({"type": "object"} if schema is None else schema)
        )
        state = matcher(self._vocabulary, grammar, log_level=0)
        if state.is_error():
            raise ValueError(
                f"this JSON schema cannot be followed: {' '.join(state.get_error().split())[:300]}"
            )
        return JsonConstraint(state, self._vocab_size)


class JsonConstraint:
    """The state of one constrained text; see ``sequence.Constraint``."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def copy(self) -> JsonConstraint:
        """Return a state of its own at the same place of the text."""
        return JsonConstraint(self._matcher.deep_copy(), self._vocab_size)

    def allowed(self) -> Bool[np.ndarray, " V"]:
        """Return which tokens may come next.

        Raises:
            ValueError: the library gave up, with its reason.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise ValueError(
                f"constrained output failed: {' '.join(self._matcher.get_error().split())[:300]}"
            )
        return np.unpackbits(mask, bitorder="little")[: self._vocab_size].astype(bool)

    def accept(self, token_id: int) -> None:
        """Take a token that ``allowed`` named."""
        self._matcher.consume_token(token_id)

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        return bool(self._matcher.is_stopped())


class _Vocabulary:
    """A tokenizer as the library wants to see it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        self.eos_token_id, self.bos_token_id = tokenizer.eos_ids[0], tokenizer.bos_id
        self.special_token_ids = [i for i in ids if tokenizer.is_special(i)]
        # Special tokens stand for no text; their names serve the library's messages only.
        self.tokens = [tokenizer.token_bytes(i) or tokenizer.token_text(i).encode() for i in ids]
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, add_bos=False)
