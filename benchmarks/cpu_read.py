"""The machine's own limit: a streaming read of more memory than caches hold, with the engine's threads."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.bench_host_kernels import stream_call
from kairox_jax.host import threads

NUM_BYTES = 256 * 2**20


class ReadRival:
    """Reads memory; only its speed is measured."""

    def __init__(self) -> None:
        threads.start()
        self._read = stream_call(np.ones(NUM_BYTES, np.uint8))
        self._read()

    def facts(self) -> dict[str, Any]:
        """Describe what is read."""
        return {"bytes": NUM_BYTES}

    def decode(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Return the speed of the median of a few reads; the arguments are those of every rival."""
        seconds = []
        for _ in range(7):
            begin = perf_counter()
            self._read()
            seconds.append(perf_counter() - begin)
        return {"gb_per_s": NUM_BYTES / float(np.median(seconds)) / 1e9}
