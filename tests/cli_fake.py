"""Stands in for `kairox_jax.engine`: repeats the prompt's characters, counts what it was asked for."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class FakeTokenizer:
    """One token a character; <s> is 1 and </s> is 2."""

    bos_id, eos_ids = 1, (2,)

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def token_text(self, token_id: int | None) -> str:
        return {None: "", 1: "<s>", 2: "</s>"}[token_id]


@dataclass
class FakeStats:
    generated_tokens: int

    def to_json(self) -> dict[str, Any]:
        return {"generated_tokens": self.generated_tokens, "hit_rate": 0.5, "predictor_recall": None}

    def line(self) -> str:
        return f"{self.generated_tokens} tokens"


@dataclass
class FakeResult:
    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    stats: FakeStats

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "stats": None, **self.stats.to_json()}


@dataclass
class FakePlan:
    slots_per_layer: int = 8
    num_neurons: int = 16
    reason: str = "asked for"

    def table(self) -> str:
        return "dense weights  1.0 MB\nslots          2.0 MB"

    def to_json(self) -> dict[str, Any]:
        return {"dense_weights": 1_000_000, "slots": 2_000_000}


@dataclass
class FakeApi:
    """Engine and plan_only, and a record of their arguments."""

    answer: str = "Grüße, 👋!"
    context_length: int = 200
    chat_template: str | None = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    error: Exception | None = None
    delay_s: float = 0.0
    opened: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    requests: list[tuple[Any, Any, Any]] = field(default_factory=list)
    closed: int = 0

    def plan_only(self, model: Any, **settings: Any) -> FakePlan:
        self.opened.append((model, settings))
        if self.error is not None:
            raise self.error
        return FakePlan()

    def Engine(self, model: Any, **settings: Any) -> FakeEngine:  # noqa: N802
        self.opened.append((model, settings))
        if self.error is not None:
            raise self.error
        return FakeEngine(self)


class FakeEngine:
    def __init__(self, api: FakeApi) -> None:
        self.api = api
        self.tokenizer = FakeTokenizer()
        self.chat_template = api.chat_template
        self.context_length = api.context_length

    def describe(self) -> str:
        return "fake device, everything in one place"

    def stream(self, prompt: Any, config: Any, *, trace: Any = None, reuse: bool = False) -> Iterator[Any]:
        self.api.requests.append((prompt, config, trace))
        ids = self.tokenizer.encode(self.api.answer)[: config.max_tokens]
        for token in ids:
            time.sleep(self.api.delay_s)
            yield SimpleNamespace(text=chr(token), token_id=token, result=None)
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        result = FakeResult(
            text=self.tokenizer.decode(ids),
            prompt_token_ids=prompt_ids,
            token_ids=ids,
            finish_reason="length" if len(ids) == config.max_tokens else "stop",
            stats=FakeStats(len(ids)),
        )
        yield SimpleNamespace(text="", token_id=None, result=result)

    def generate(self, prompt: Any, config: Any, *, trace: Any = None) -> Any:
        return list(self.stream(prompt, config, trace=trace))[-1].result

    def close(self) -> None:
        self.api.closed += 1


if __name__ == "__main__":
    # python cli_fake.py DELAY_S ANSWER WORDS...: the command line over the fake, in a process of its own.
    from kairox_jax.cli import main

    sys.exit(main(sys.argv[3:], engine_api=FakeApi(answer=sys.argv[2], delay_s=float(sys.argv[1]))))
