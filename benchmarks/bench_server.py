"""Load on a real `kairox serve`: many clients at once, a third of them leaving early; JSON out.

Each phase serves the same greedy requests: alone one by one (the reference), then ``--clients`` at once. Answers that
were not cut off must equal those of the reference. A server of its own is started unless ``--url`` names one.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import machine
from benchmarks.load_clients import Call, differing, make_calls, run_phase, summary

START_S = 600
WARM_UP = 2  # requests a client


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


def _rss(pid: int | None) -> int | None:
    return None if pid is None else resident_bytes(pid)


def measure(address: str, pid: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """Run all phases on one server."""
    calls = make_calls(args.requests, seed=args.seed, cut_frac=args.cut_frac)
    whole = [Call(prompt=call.prompt, max_tokens=call.max_tokens) for call in calls]
    first = make_calls(WARM_UP * args.clients, seed=args.seed + 1, cut_frac=0)
    run_phase(address, first, args.clients, name="warm-up")
    rss = {"after_warm_up": _rss(pid)}
    alone, alone_s = run_phase(address, whole, 1, name="alone")
    rss["after_alone"] = _rss(pid)
    at_once, at_once_s = run_phase(address, whole, args.clients, name="at once")
    rss["after_at_once"] = _rss(pid)
    cut, cut_s = run_phase(address, calls, args.clients, name="at once, some cut off")
    rss["at_the_end"] = _rss(pid)
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
        "rss_bytes": rss,
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
