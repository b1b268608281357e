"""One command for a GPU machine: ``python -m benchmarks.gpu [--quick] [--parts numerics,link]``, under 10 minutes.

Writes benchmarks/results/gpu/<device>.json and prints the tables; exits 3 where there is no GPU. Each part runs in
a process of its own with a time limit: what crashes or hangs is recorded, and the rest goes on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import machine
from benchmarks.gpu.report import report, table_of
from benchmarks.gpu.settings import SIZES, TimeBox

# Seconds of each part; together under 10 minutes with the starts.
PARTS = {"numerics": 110, "link": 30, "callbacks": 45, "commits": 35, "bandwidth": 130, "decode": 200}
GRACE_S = 25.0  # for the start of a process and for what is under way when the time is over
RESULTS = machine.ROOT / "benchmarks/results/gpu"
_DEVICE = (
    "import json, jax; d = jax.devices()[0];"
    "print(json.dumps({'platform': d.platform, 'name': d.device_kind, 'jax': jax.__version__}))"
)


def find_device() -> dict[str, Any]:
    """Return what JAX takes as its first device, asked in another process, so that this one holds no memory."""
    done = subprocess.run([sys.executable, "-c", _DEVICE], capture_output=True, text=True)
    if done.returncode:
        return {"platform": None, "name": (done.stderr.strip().splitlines() or ["JAX does not start"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def run_part(part: str, size: str, seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own; an error, a crash or a hang becomes ``{"failed": reason}``."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if part == "decode":  # which holds its own processes to a budget
        environment = dict(os.environ)
    command = [sys.executable, "-m", "benchmarks.gpu", "--worker", part, "--size", size]
    command += ["--seconds", str(seconds)]
    try:
        done = subprocess.run(
            command,
            cwd=machine.ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds + GRACE_S,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer in {seconds + GRACE_S:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return {"failed": f"exit status {done.returncode}: {lines[-1][:300]}"}
    return json.loads(done.stdout.splitlines()[-1])


def worker(part: str, size: str, seconds: float) -> dict[str, Any]:
    """Run a part in this process."""
    module = importlib.import_module(f"benchmarks.gpu.{part}")
    if part == "decode":
        return module.run(SIZES[size], TimeBox(seconds), size)
    return module.run(SIZES[size], TimeBox(seconds))


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit status: 3 without a GPU, 1 where a part failed as a whole."""
    args = _parser().parse_args(argv)
    if args.worker:
        print(json.dumps(worker(args.worker, args.size, args.seconds)))
        return 0
    parts = list(PARTS) if args.parts is None else args.parts.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        print(f"--parts {unknown[0]!r} is unknown: choose of {', '.join(PARTS)}", file=sys.stderr)
        return 2
    device = find_device()
    if device["platform"] not in ("gpu", "cuda"):
        print(f"no GPU: JAX's first device is {device['platform']} ({device['name']})", file=sys.stderr)
        return 3
    size = "quick" if args.quick else args.size
    record = machine.facts() | {"device": device, "size": size, "parts": {}}
    out = args.out or RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', device['name'].lower()).strip('-')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    for part in parts:
        begin = perf_counter()
        record["parts"][part] = result = run_part(part, size, PARTS[part])
        result["took_s"] = round(perf_counter() - begin, 1)
        out.write_text(
            json.dumps(record, indent=1) + "\n"
        )  # after each part: an interrupted run keeps the rest
        _progress(part, result, out)
    print(report(record))
    return 1 if any("failed" in result for result in record["parts"].values()) else 0


def _progress(part: str, result: dict[str, Any], out: Path) -> None:
    state = table_of(part, result) if "failed" in result else f"{len(result['rows'])} rows"
    print(f"{part}: {state} in {result['took_s']} s, written to {out}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases, shapes and policies")
    parser.add_argument("--parts", metavar="A,B", help=f"of {', '.join(PARTS)}; all where not given")
    parser.add_argument("--out", type=Path, help="JSON file; by the device's name where not given")
    parser.add_argument("--size", choices=sorted(SIZES), default="full", help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=sorted(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
