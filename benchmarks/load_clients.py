"""What a client of the load benchmark does: draw requests, carry them out, and sum up what came of them."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import pairwise
from statistics import median, quantiles
from threading import Lock
from typing import Any

WORDS = (
    "the sea and an old harbour town where every morning boats go out to fish while gulls cry over roofs of slate"
).split()
PROMPT_WORDS, ANSWER_TOKENS = (4, 120), (4, 64)
PATIENCE_S, RETRY_S = 600, 0.05
PROGRESS_S = 5.0  # between two lines


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request.

    Attributes:
        prompt: the text to continue.
        max_tokens: length of the answer.
        leave_after: close the connection after this many chunks; None reads the answer to its end.
    """

    prompt: str
    max_tokens: int
    leave_after: int | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a call.

    Attributes:
        text: of the answer, or None where the client left.
        tokens: chunks with text that were read.
        first_token_s: from the request to the first of them.
        pauses_s: between two of them.
        refused: answers 429 before it was served.
        error: an answer that should not have come, or "".
    """

    text: str | None
    tokens: int
    first_token_s: float | None
    refused: int
    error: str = ""
    pauses_s: tuple[float, ...] = ()


class Progress:
    """Says on the standard error how far a phase is, every few seconds.

    Args:
        name: of the phase.
        count: of its requests.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count, self._done = name, count, 0
        self._begin = self._said = time.perf_counter()
        self._lock = Lock()

    def one_more(self) -> None:
        """Count a request that is over; any thread may call."""
        with self._lock:
            self._done += 1
            now = time.perf_counter()
            if self._done < self._count and now - self._said < PROGRESS_S:
                return
            self._said, passed = now, now - self._begin
            left = passed / self._done * (self._count - self._done)
            print(
                f"{self._name}: {self._done} of {self._count} requests, {passed:.0f} s, about {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )


def make_calls(count: int, *, seed: int, cut_frac: float) -> list[Call]:
    """Draw requests of mixed length; ``cut_frac`` of them leave early."""
    rng = random.Random(seed)
    calls = []
    for _ in range(count):
        words = rng.choices(WORDS, k=rng.randint(*PROMPT_WORDS))
        limit = rng.randint(*ANSWER_TOKENS)
        leave = rng.randint(0, limit - 1) if rng.random() < cut_frac else None
        calls.append(Call(prompt=" ".join(words), max_tokens=limit, leave_after=leave))
    return calls


def perform(address: str, call: Call) -> Outcome:
    """Carry out one call, waiting and trying again while the queue is full."""
    body = {"prompt": call.prompt, "max_tokens": call.max_tokens, "temperature": 0, "ignore_eos": True}
    refused, begin = 0, time.perf_counter()
    while True:
        connection = HTTPConnection(address, timeout=PATIENCE_S)
        try:
            connection.request(
                "POST",
                "/v1/completions",
                json.dumps({**body, "stream": True}),
                {"Content-Type": "application/json"},
            )
            answer = connection.getresponse()
            if answer.status != 429:
                return _read(answer, call, begin, refused)
        finally:
            connection.close()
        refused += 1
        time.sleep(RETRY_S)


def _read(answer: Any, call: Call, begin: float, refused: int) -> Outcome:
    if answer.status != 200:
        error = f"status {answer.status}: {answer.read()[:200]!r}"
        return Outcome(text=None, tokens=0, first_token_s=None, refused=refused, error=error)
    pieces: list[str] = []
    times: list[float] = []
    error, text = "the stream ended early", None
    while call.leave_after is None or len(pieces) < call.leave_after:
        line = answer.readline().decode()
        if not line or line == "data: [DONE]\n":
            if line:
                text, error = "".join(pieces), ""
            break
        if line.startswith("data:"):
            event = json.loads(line[5:])
            if "error" in event:
                error = event["error"]["message"]
                break
            if piece := event["choices"][0]["text"]:
                times.append(time.perf_counter())
                pieces.append(piece)
    else:
        error = ""
    return Outcome(
        text=text,
        tokens=len(pieces),
        first_token_s=times[0] - begin if times else None,
        refused=refused,
        error=error,
        pauses_s=tuple(later - earlier for earlier, later in pairwise(times)),
    )


def run_phase(address: str, calls: Sequence[Call], clients: int, *, name: str) -> tuple[list[Outcome], float]:
    """Perform the calls with so many clients at once; return the outcomes and the seconds it took."""
    progress = Progress(name, len(calls))

    def one(call: Call) -> Outcome:
        outcome = perform(address, call)
        progress.one_more()
        return outcome

    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        outcomes = list(pool.map(one, calls))
    return outcomes, time.perf_counter() - begin


def summary(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Return throughput, and median and 99th percentile of the time to the first token and of the pauses after it."""
    tokens = sum(o.tokens for o in outcomes)
    return {
        "requests": len(outcomes),
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 3),
        **_spread("first_token_s", [o.first_token_s for o in outcomes if o.first_token_s is not None]),
        **_spread("pause_s", [pause for o in outcomes for pause in o.pauses_s]),
        "cut_off": sum(o.text is None and not o.error for o in outcomes),
        "refused_429": sum(o.refused for o in outcomes),
        "errors": [o.error for o in outcomes if o.error],
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {
        f"{name}_median": round(median(values), 4) if values else None,
        f"{name}_p99": round(quantiles(values, n=100)[98], 4) if len(values) > 1 else None,
    }


def differing(outcomes: Sequence[Outcome], alone: Sequence[Outcome]) -> list[int]:
    """Return the indices of finished answers that are not what the same request gave alone."""
    pairs = enumerate(zip(outcomes, alone, strict=True))
    return [i for i, (got, want) in pairs if got.text is not None and got.text != want.text]
