"""Times of compiled programs, and the implementations that a platform can run."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax

from benchmarks.spread import spread


def median_s(call: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of a call that is awaited; one call before it compiles and warms up."""
    jax.block_until_ready(call())
    samples = []
    for _ in range(repeats):
        begin = perf_counter()
        jax.block_until_ready(call())
        samples.append(perf_counter() - begin)
    return spread(samples)["median"]


def implementations() -> dict[str, dict[str, Any]]:
    """Return each implementation's options: on a CPU the Pallas kernels are interpreted."""
    on_gpu = jax.default_backend() == "gpu"
    return {
        "xla": {"implementation": "xla"},
        "pallas": {"implementation": "pallas", "interpret": not on_gpu},
        "triton": {"implementation": "triton"},
    }


def one_line(error: BaseException) -> str:
    """Return an error's kind and first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
