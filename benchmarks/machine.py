"""Facts of the machine and the program that every saved measurement carries."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).parents[1]


def cpu_model() -> str:
    """Return the CPU's name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    found = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    return found or platform.processor() or platform.machine()


def git_revision() -> dict[str, Any]:
    """Return the commit, and whether tracked files differ from it; None for both, and a warning, outside a checkout."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "modified": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        print(
            f"warning: this result carries no commit (git in {ROOT}: {str(reason).strip()}): measure in a clone, "
            "not in an exported copy",
            file=sys.stderr,
        )
        return {"commit": None, "modified": None}


def load_average() -> float | None:
    """Return the runnable processes of the last minute, or None where the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


@dataclass(frozen=True, kw_only=True)
class CpuUse:
    """CPU time so far.

    Attributes:
        wall_s: the clock.
        busy_s: of all processors together, whoever used it.
        own_s: of the processes that are measured.
    """

    wall_s: float
    busy_s: float
    own_s: float


def cpu_use(pids: Sequence[int]) -> CpuUse | None:
    """Return the CPU time that the machine and these processes have used, or None without Linux's /proc."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    user, nice, system, _idle, _iowait, *rest = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    own = 0
    for pid in pids:
        # The name in brackets may hold blanks; user and system time are the 12th and 13th field after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        own += int(fields[11]) + int(fields[12])
    return CpuUse(wall_s=perf_counter(), busy_s=(user + nice + system + sum(rest)) / ticks, own_s=own / ticks)


def others_frac(before: CpuUse | None, after: CpuUse | None, cpus: int) -> float | None:
    """Return the share of the machine's CPU time that others took between two looks; None if unknown."""
    if before is None or after is None:
        return None
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(0.0, others_s / ((after.wall_s - before.wall_s) * cpus))


def facts() -> dict[str, Any]:
    """Return date, revision, CPU, system and the versions of Python, NumPy and this package."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git_revision(),
        "cpu": cpu_model(),
        "logical_cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {"python": platform.python_version(), "numpy": importlib.metadata.version("numpy")},
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
