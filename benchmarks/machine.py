"""Facts of the machine and the program that every saved measurement carries."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def cpu_model() -> str:
    """Return the CPU's name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    found = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    return found or platform.processor() or platform.machine()


def git_revision() -> dict[str, Any]:
    """Return the commit, and whether tracked files differ from it; None for both outside a checkout."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "modified": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "modified": None}


def load_average() -> float | None:
    """Return the runnable processes of the last minute, or None where the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def facts() -> dict[str, Any]:
    """Return date, revision, CPU, system and the versions of Python, NumPy and this package."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": git_revision(),
        "cpu": cpu_model(),
        "logical_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {"python": platform.python_version(), "numpy": importlib.metadata.version("numpy")},
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
