"""`kairox doctor`: what this machine has, what is missing for its GPU, and the remedy of each."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kairox_jax.commands import machine
from kairox_jax.commands.checks import Check, check_gpu, check_host, check_jax, check_numba, check_packages
from kairox_jax.commands.flags import Flag, add_flags
from kairox_jax.nvidia import visible_gpus

FLAGS = (
    Flag(dest="json", names=("--json",), help="print one JSON object"),
    Flag(dest="debug", names=("--debug",), help="show the traceback of an error"),
)

# JAX and numba run in a process of their own: a plugin that aborts or hangs must not take the report with it.
PROBE_JAX = """
import json, jax
def limit(device):
    return (device.memory_stats() or {}).get("bytes_limit")
print(json.dumps([[d.platform, d.device_kind, limit(d)] for d in jax.devices()]))
"""
PROBE_NUMBA = """
import importlib, json
def loads(name):
    try:
        importlib.import_module("numba.np.ufunc." + name)
    except ImportError:
        return False
    return True
modules = {"tbb": "tbbpool", "omp": "omppool", "workqueue": "workqueue"}
print(json.dumps([name for name, module in modules.items() if loads(module)]))
"""


def add_to(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine has, and what is missing for its GPU",
        description="Report devices, memory, CPU, links and versions, with a remedy for what is missing. "
        "Exit status 1 where something that kairox needs is broken.",
        allow_abbrev=False,
    )
    add_flags(parser, {"output": FLAGS})
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, engine_api: Any | None = None) -> int:
    """Print the report; return 1 where something needed is broken, else 0."""
    del engine_api
    checks = examine()
    broken = any(check.status == "broken" for check in checks)
    if args.json:
        print(json.dumps({"ok": not broken, "checks": [asdict(check) for check in checks]}))
    else:
        print("\n".join(report(checks)))
    return int(broken)


def examine(root: Path = machine.ROOT) -> list[Check]:
    """Look at this machine."""
    devices = probe(PROBE_JAX)
    return [
        *check_host(root),
        *check_packages(),
        check_numba(probe(PROBE_NUMBA)),
        check_jax(devices),
        *check_gpu(machine.read_links(root), machine.read_driver(root), visible_gpus(), devices),
    ]


def report(checks: Iterable[Check]) -> Iterable[str]:
    """Lay the checks out as lines."""
    checks = list(checks)
    width = max(len(check.name) for check in checks)
    for check in checks:
        yield f"{check.status:<8} {check.name:<{width}}  {check.value}"
        if check.remedy:
            yield f"{'':<8} {'':<{width}}  -> {check.remedy}"
    bad = [check.name for check in checks if check.status == "broken"]
    yield ""
    yield f"kairox cannot run: {', '.join(bad)}" if bad else "kairox can run on this machine"


def probe(script: str) -> Any:
    """Run Python in a process of its own.

    Args:
        script: prints JSON as its last line.

    Returns:
        What it printed; where it failed, a text that says how.
    """
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "no answer within 120 seconds"
    if done.returncode == 0 and done.stdout.strip():
        return json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"fails with status {done.returncode}: {last}"
