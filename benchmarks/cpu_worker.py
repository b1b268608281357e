"""A process of its own for each rival of ``bench_cpu_decode``: answers requests, one JSON line each.

Peak memory is then the rival's alone, and the rivals can take turns. What libraries print goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any, TextIO

RIVALS = {
    "kairox": ("benchmarks.cpu_kairox", "KairoxRival"),
    "llama": ("benchmarks.cpu_llama", "LlamaRival"),
    "read": ("benchmarks.cpu_read", "ReadRival"),
}


def memory() -> dict[str, int]:
    """Return this process's peak and present resident memory in bytes, pages of mapped files included."""
    status = Path("/proc/self/status")
    if not status.exists():
        unit = 1 if sys.platform == "darwin" else 1024
        return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    return {
        name: int(fields[key].split()[0]) * 1024
        for name, key in (("peak_bytes", "VmHWM"), ("resident_bytes", "VmRSS"))
    }


def answer(rival: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out one request: ``do`` names a method of the rival, or ``memory``; the rest is arguments."""
    arguments = {name: value for name, value in request.items() if name != "do"}
    return memory() if request["do"] == "memory" else getattr(rival, request["do"])(**arguments)


def serve(requests: TextIO, answers: TextIO) -> None:
    """Make the rival that the first line asks for, then answer line by line until the input ends."""
    rival: Any = None
    for line in requests:
        request = json.loads(line)
        try:
            if rival is None:
                module, name = RIVALS[request.pop("kind")]
                rival = getattr(importlib.import_module(module), name)(**request)
                reply = rival.facts()
            else:
                reply = answer(rival, request)
        except (ValueError, OSError, RuntimeError) as error:
            reply = {"error": f"{error}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, channel)
