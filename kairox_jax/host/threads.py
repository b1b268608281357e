"""Threads of the host kernels.

Owns the settings that must be in place before numba's threading layer loads. The lock makes one
caller at a time the owner of the parallel regions: the ``workqueue`` layer aborts on two.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Read once by libgomp when it loads; values that the user has set are left alone. Workers that spin without end
# after a region (its default) steal the cores of XLA's own threads; workers that sleep at once must be woken for
# the next region, about 0.1 ms later. A short spin bridges the gap between two regions of one layer: the attention
# blocks of a 135M model took 4.7 ms a token instead of 11.2 on two cores (7.5 with endless spinning).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import numba  # noqa: E402
from numba.np.ufunc.parallel import threading_layer  # noqa: E402

config: Any = numba.config  # pyright: ignore[reportPrivateImportUsage]
if "NUMBA_THREADING_LAYER_PRIORITY" not in os.environ:
    # TBB, where someone has installed it, is slower to enter a region than OpenMP; workqueue is always there.
    config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

owner = threading.RLock()
_local = threading.local()
_limit: dict[str, int] = {}


def _allowed_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _siblings(cpu: int) -> str:
    """Name the physical core of a logical one; a machine that does not tell has one thread per core."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota_cpus() -> float:
    """Return the processors that a container's quota (cgroup v2) allows; infinity without one."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if quota == "max" else int(quota) / int(period)


def thread_count() -> int:
    """Return the threads that the kernels use.

    Returns:
        What ``limit_threads`` set, else the physical cores that affinity and container quota allow, at most
        ``NUMBA_NUM_THREADS``, at least 1.
    """
    return _limit["threads"] if "threads" in _limit else _available_threads()


@functools.cache
def _available_threads() -> int:
    cores = len({_siblings(cpu) for cpu in _allowed_cpus()})
    return max(1, int(min(cores, _quota_cpus(), config.NUMBA_NUM_THREADS)))


def limit_threads(num_threads: int) -> None:
    """Let the kernels of this process use at most so many threads.

    Raises:
        ValueError: less than one, or more than ``NUMBA_NUM_THREADS`` allows.
    """
    check_threads(num_threads)
    _limit["threads"] = num_threads


def check_threads(num_threads: int) -> None:
    """Raise ``ValueError`` where ``limit_threads`` would."""
    if not 1 <= num_threads <= config.NUMBA_NUM_THREADS:
        raise ValueError(
            f"--threads {num_threads}: choose 1 to {config.NUMBA_NUM_THREADS}, the processors of this machine"
        )


def start() -> str:
    """Load the threading layer and give the calling thread its share of workers (numba counts per thread).

    Returns:
        The layer: "omp", "tbb" or "workqueue".
    """
    if not hasattr(_local, "layer"):
        with owner:
            numba.set_num_threads(thread_count())
            _local.layer = threading_layer()
    return _local.layer


@contextmanager
def own(num_threads: int | None = None) -> Iterator[int]:
    """Own the parallel regions for a while.

    Args:
        num_threads: threads to use, at most ``thread_count()``; None takes all of them.

    Yields:
        The threads that regions have meanwhile.
    """
    with owner:
        start()
        most = thread_count()
        wanted = most if num_threads is None else max(1, min(num_threads, most))
        if numba.get_num_threads() != wanted:
            numba.set_num_threads(wanted)
        yield wanted
