"""Load on a real `kairox serve`: many clients at once, a third of them leaving early; JSON out.

Each phase serves the same greedy requests: alone one by one (the reference), then ``--clients`` at once. Answers that
were not cut off must equal those of the reference. A server of its own is started unless ``--url`` names one.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

from benchmarks import machine

WORDS = (
    "the sea and an old harbour town where every morning boats go out to fish while gulls cry over roofs of slate"
).split()
PROMPT_WORDS, ANSWER_TOKENS = (4, 120), (4, 64)
START_S, RETRY_S = 600, 0.05


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
        refused: answers 429 before it was served.
        error: an answer that should not have come, or "".
    """

    text: str | None
    tokens: int
    first_token_s: float | None
    refused: int
    error: str = ""


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
        connection = HTTPConnection(address, timeout=START_S)
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
    first, error, text = None, "the stream ended early", None
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
                first = time.perf_counter() - begin if first is None else first
                pieces.append(piece)
    else:
        error = ""
    return Outcome(text=text, tokens=len(pieces), first_token_s=first, refused=refused, error=error)


def run_phase(address: str, calls: Sequence[Call], clients: int) -> tuple[list[Outcome], float]:
    """Perform the calls with so many clients at once; return the outcomes and the seconds it took."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        outcomes = list(pool.map(lambda call: perform(address, call), calls))
    return outcomes, time.perf_counter() - begin


def summary(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Return throughput, and the median and 99th percentile of the time to the first token."""
    times = [o.first_token_s for o in outcomes if o.first_token_s is not None]
    tokens = sum(o.tokens for o in outcomes)
    return {
        "requests": len(outcomes),
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 3),
        "first_token_s_median": round(median(times), 4) if times else None,
        "first_token_s_p99": round(quantiles(times, n=100)[98], 4) if len(times) > 1 else None,
        "cut_off": sum(o.text is None and not o.error for o in outcomes),
        "refused_429": sum(o.refused for o in outcomes),
        "errors": [o.error for o in outcomes if o.error],
    }


def differing(outcomes: Sequence[Outcome], alone: Sequence[Outcome]) -> list[int]:
    """Return the indices of finished answers that are not what the same request gave alone."""
    pairs = enumerate(zip(outcomes, alone, strict=True))
    return [i for i, (got, want) in pairs if got.text is not None and got.text != want.text]


def get_json(address: str, path: str) -> Any:
    """Return the JSON of a GET, or None while the server does not answer with 200."""
    connection = HTTPConnection(address, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        data = answer.read()
        return json.loads(data) if answer.status == 200 else None
    finally:
        connection.close()


def resident_bytes(pid: int) -> int:
    """Return a process's memory, as Linux tells it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024


@contextmanager
def server(flags: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Start `kairox serve` on a free port; yields its address and process id."""
    command = [sys.executable, "-m", "kairox_jax.cli", "serve", "--port", "0", *flags]
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            end = time.monotonic() + START_S
            while not (found := re.search(r"listening on http://(\S+:\d+)", Path(log.name).read_text())):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the server did not start: {Path(log.name).read_text()}")
                time.sleep(0.1)
            while get_json(found[1], "/health") is None:
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the model was not loaded: {Path(log.name).read_text()}")
                time.sleep(0.2)
            yield found[1], process.pid
        finally:
            process.terminate()
            process.wait(60)


def measure(address: str, pid: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """Run all phases on one server."""
    calls = make_calls(args.requests, seed=args.seed, cut_frac=args.cut_frac)
    whole = [Call(prompt=call.prompt, max_tokens=call.max_tokens) for call in calls]
    run_phase(address, make_calls(2 * args.clients, seed=args.seed + 1, cut_frac=0), args.clients)  # warm-up
    before = None if pid is None else resident_bytes(pid)
    alone, alone_s = run_phase(address, whole, 1)
    at_once, at_once_s = run_phase(address, whole, args.clients)
    cut, cut_s = run_phase(address, calls, args.clients)
    after = None if pid is None else resident_bytes(pid)
    time.sleep(1.0)
    live = get_json(address, "/live")
    one, many = summary(alone, alone_s), summary(at_once, at_once_s)
    return {
        "machine": machine.facts(),
        "props": get_json(address, "/props"),
        "clients": args.clients,
        "seed": args.seed,
        "alone": one,
        "at_once": many,
        "at_once_cut": summary(cut, cut_s),
        "speedup": round(many["tokens_per_s"] / one["tokens_per_s"], 3),
        "different_answers": differing(at_once, alone) + differing(cut, alone),
        "stuck": {"active": live["active"], "waiting": live["waiting"]},
        "rss_bytes": {"after_warm_up": before, "at_the_end": after},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print JSON; the status is 1 where an answer differed, failed or got stuck."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a server that runs already; its memory is not measured")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--cut-frac", type=float, default=1 / 3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("flags", nargs="*", help="of kairox serve, after --")
    args = parser.parse_args(argv)
    if args.url is not None:
        report = measure(urlsplit(args.url).netloc, None, args)
    else:
        with server(args.flags) as (address, pid):
            report = measure(address, pid, args)
    text = json.dumps(report, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    failed = [part for name in ("alone", "at_once", "at_once_cut") for part in report[name]["errors"]]
    return int(bool(failed or report["different_answers"] or any(report["stuck"].values())))


if __name__ == "__main__":
    sys.exit(main())
