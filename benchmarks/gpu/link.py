"""The link from host to device: GB/s against the size of a transfer, for three kinds of host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.gpu.settings import Settings, TimeBox
from benchmarks.gpu.timing import median_s, one_line


def run(settings: Settings, box: TimeBox) -> dict[str, Any]:
    """Return one row for each size and kind of memory."""
    rows, cut = [], False
    for size in settings.link_bytes:
        for name, make in KINDS.items():
            if box.over:
                cut = True
                continue
            row: dict[str, Any] = {"bytes": size, "memory": name}
            try:
                seconds = median_s(make(size), settings.repeats)
                row |= {"us": seconds * 1e6, "gb_per_s": size / seconds / 1e9}
            except Exception as error:  # a kind that this JAX or device lacks is a result
                row["failed"] = one_line(error)
            rows.append(row)
    return {"rows": rows, "cut": cut}


def _fresh(size: int) -> Callable[[], Any]:
    source = np.ones(size, np.uint8)
    return lambda: jax.device_put(source.copy())  # as the store gathers into a fresh buffer


def _reused(size: int) -> Callable[[], Any]:
    staging, source = np.ones(size, np.uint8), np.ones(size, np.uint8)

    def send() -> Any:
        np.copyto(staging, source)  # safe only because each transfer is awaited
        return jax.device_put(staging)

    return send


def _pinned(size: int) -> Callable[[], Any]:
    device = jax.devices()[0]
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    target = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
    source = jax.block_until_ready(jax.device_put(np.ones(size, np.uint8), pinned))
    return lambda: jax.device_put(source, target)


KINDS: dict[str, Callable[[int], Callable[[], Any]]] = {
    "NumPy, fresh": _fresh,
    "NumPy, reused": _reused,
    "pinned_host": _pinned,
}
