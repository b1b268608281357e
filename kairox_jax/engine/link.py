"""The way of records from host to device: the machine's own, or one held to a bandwidth and a latency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from time import perf_counter

import jax
import numpy as np
from jaxtyping import Array, Float, UInt8

from kairox_jax.config import parse_link


class LinkClosed(Exception):
    """A transfer was abandoned because its link was closed."""


class Link:
    """Sends records with one ``device_put`` and waits for their arrival. Used by one thread, which may wait."""

    name = "device"
    waits = False  # rather than works, in what a transfer takes

    def send(
        self, gather: Callable[[], UInt8[np.ndarray, "M nbytes"]]
    ) -> tuple[UInt8[Array, "M nbytes"], float]:
        """Send what ``gather`` puts into a fresh buffer.

        Returns:
            The records on the device, and the time from the beginning of gathering to their arrival, in ms.

        Raises:
            LinkClosed: the link was closed on the way.
        """
        begin = perf_counter()
        buffer = gather()
        self._carry(buffer.nbytes)
        records = jax.device_put(buffer)
        records.block_until_ready()
        return records, (perf_counter() - begin) * 1e3

    def close(self) -> None:
        """Abandon what can be abandoned; may be called from any thread."""

    def _carry(self, num_bytes: int) -> None:
        """Take the time that this many bytes need beyond the machine's own."""


class EmulatedLink(Link):
    """A link that delivers a buffer no earlier than latency + bytes / bandwidth after it could start.

    It waits, in the thread that sends. Padding rows of a buffer count: a real link carries them too.

    Args:
        bytes_per_s: bandwidth.
        latency_s: of each transfer.
    """

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
        self.name = f"emulated, {bytes_per_s / 1e9:g} GB/s after {latency_s * 1e6:g} us"
        self.waits = True
        self._stalled_until = 0.0
        self._closed = Event()

    def stall(self, seconds: float) -> None:
        """Deliver nothing for so long from now on, what is on its way included; may be called from any thread."""
        self._stalled_until = perf_counter() + seconds

    def close(self) -> None:
        """Abandon the transfer on its way: its sender gets ``LinkClosed``."""
        self._closed.set()

    def _carry(self, num_bytes: int) -> None:
        begin = max(perf_counter(), self._stalled_until)
        arrival = begin + self.latency_s + num_bytes / self.bytes_per_s
        while (left := max(arrival, self._stalled_until) - perf_counter()) > 0:
            if self._closed.wait(left):
                raise LinkClosed("the link was closed with a transfer on its way")


class LinkCost:
    """What a transfer takes: a fixed part and one for each record, a straight line through measured times.

    Old times are forgotten slowly; the first ones never, so that there are always two sizes to tell the parts apart.

    Args:
        anchors: pairs of records and ms, of two sizes.
    """

    FORGET, CLIP = 0.05, 4.0  # a time counts at most as CLIP times what was expected

    def __init__(self, anchors: Sequence[tuple[int, float]]) -> None:
        self._anchors = sum((self._moments(*anchor) for anchor in anchors), np.zeros(5))
        self._recent = np.zeros(5)
        self._fit()

    def add(self, records: int, ms: float) -> None:
        """Take in a measured transfer."""
        most = self.CLIP * (self.fixed_ms + records * self.ms_per_record)
        self._recent = (1 - self.FORGET) * self._recent + self._moments(
            records, min(ms, most) if most else ms
        )
        self._fit()

    @staticmethod
    def _moments(records: int, ms: float) -> Float[np.ndarray, " 5"]:
        return np.array([1.0, records, records * records, ms, records * ms])

    def _fit(self) -> None:
        count, x, xx, y, xy = (self._anchors + self._recent).tolist()
        spread = count * xx - x * x
        slope = (count * xy - x * y) / spread if spread > 0 else 0.0
        fixed = (y - slope * x) / count if count else 0.0
        if slope <= 0:  # noise: all of it is fixed
            slope, fixed = 0.0, y / count if count else 0.0
        elif fixed < 0:
            slope, fixed = xy / xx, 0.0
        self.ms_per_record, self.fixed_ms = slope, fixed


def make_link(emulated: str | None) -> Link:
    """Return the machine's own link, or one emulated as ``parse_link`` understands the text."""
    return Link() if emulated is None else EmulatedLink(*parse_link(emulated))
