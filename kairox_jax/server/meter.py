"""What the server counts: Prometheus metrics, and the last steps for the page's live view."""

from __future__ import annotations

from collections import deque
from threading import Lock
from time import monotonic
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from kairox_jax.engine import Chunk, Engine, StepCounts, Ticket, Worker

KEPT_STEPS = 600
MAX_BINS = 96
SNAPSHOT_S = 0.25  # between looks at the slot table and the policy
RATE_S = 5.0  # of tokens a second
COLUMNS = ("seq", "time_s", "gpu_ms", "io_ms", "cpu_ms", "hits", "residual", "promotions", "evictions")
FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

disable_created_metrics()  # a second sample for each counter that says when it was made


class Meter:
    """Counts requests, tokens, moves and times; an ``Observer`` of the worker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._lock = Lock()
        self._last_step: StepCounts | None = None
        self._steps: deque[tuple[float, ...]] = deque(maxlen=KEPT_STEPS)
        self._token_times: deque[float] = deque(maxlen=4096)
        self._seq = 0
        self._last_token: dict[Ticket, float] = {}
        self._engine: Engine | None = None
        self._looked_at = 0.0
        self._residency = np.zeros((0, 0), np.int32)
        self._policy: dict[str, float] = {}
        self._make_metrics()

    def _make_metrics(self) -> None:
        registry = self.registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kairox_{name}", text, labels, registry=registry)

        self.requests = counter("requests", "HTTP requests", "route", "status")
        self._outcomes = counter("generations", "Generations by how they ended", "outcome")
        self._tokens = counter("tokens", "Tokens: of prompts, of these reused, and generated", "kind")
        self._active = counter("active_neurons", "Active neurons by where they were computed", "place")
        self._moves = counter("moves", "Neurons promoted, evicted, and evicted unused", "kind")
        self._link = counter("link_bytes", "Bytes of promoted records")
        self._time = counter("step_seconds", "Time of decode steps by part (gpu, io, cpu)", "part")
        self._num_steps = counter("decode_steps", "Decode steps")
        self._first = Histogram(
            "kairox_time_to_first_token_seconds",
            "From the request to its first token, waiting included",
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self._per_token = Histogram(
            "kairox_time_per_token_seconds",
            "Between two tokens of a generation",
            buckets=PER_TOKEN_S,
            registry=registry,
        )
        self._hit_rate = Gauge("kairox_hit_rate", "Share of active neurons on the device", registry=registry)
        self._resident = Gauge("kairox_resident_neurons", "Neurons on the device", registry=registry)
        self._hits = self._residual = 0

    def watch(self, worker: Worker) -> None:
        """Report a worker's queue."""
        waiting = Gauge("kairox_queue_length", "Requests that wait", registry=self.registry)
        waiting.set_function(lambda: worker.num_waiting)
        active = Gauge("kairox_active_requests", "Requests that are being served", registry=self.registry)
        active.set_function(lambda: worker.num_active)

    def open(self, engine: Engine) -> None:
        """Take the engine to look at, on the worker's thread, before it serves."""
        self._engine = engine
        self._look(monotonic())

    def chunk(self, ticket: Ticket, chunk: Chunk) -> None:
        """Count a token and the step that it came from."""
        now = monotonic()
        if chunk.token_id is not None:
            self._tokens.labels("generated").inc()
            before = self._last_token.get(ticket)
            if before is None:
                self._first.observe(now - ticket.submitted_at)
            else:
                self._per_token.observe(now - before)
            self._last_token[ticket] = now
            self._count_step(chunk, now)
        if chunk.result is not None:
            stats = chunk.result.stats
            self._tokens.labels("prompt").inc(stats.prompt_tokens)
            self._tokens.labels("reused").inc(stats.reused_tokens)
        if now - self._looked_at > SNAPSHOT_S or chunk.result is not None:
            self._look(now)

    def ended(self, ticket: Ticket, outcome: str) -> None:
        """Count how a generation ended."""
        self._last_token.pop(ticket, None)
        self._outcomes.labels(outcome).inc()

    def live(self, since: int) -> dict[str, Any]:
        """Return the steps after number ``since`` (column by column) and what holds now."""
        now = monotonic()
        with self._lock:
            steps = [step for step in self._steps if step[0] > since]
            recent = sum(at > now - RATE_S for at in self._token_times)
            return {
                "now_s": round(now, 3),
                "steps": {name: [step[i] for step in steps] for i, name in enumerate(COLUMNS)},
                "tokens_per_s": round(recent / RATE_S, 2),
                "hit_rate": self._rate(),
                "policy": self._policy,
                "residency": {
                    "bins": self._residency.tolist(),
                    "neurons_per_bin": self._neurons_per_bin(),
                },
            }

    def _count_step(self, chunk: Chunk, now: float) -> None:
        step = chunk.step
        with self._lock:
            self._token_times.append(now)
            if step is None or step is self._last_step:  # several sequences share a step
                return
            self._last_step = step
            self._seq += 1
            hits, residual = int(step.hits.sum()), int(step.residual.sum())
            self._hits, self._residual = self._hits + hits, self._residual + residual
            times, moves = step.times, step.moves
            parts = [round(float(ms), 4) for ms in (times.gpu_ms, moves.io_ms, times.cpu_ms)]
            self._steps.append(
                (self._seq, round(now, 4), *parts, hits, residual, moves.promotions, moves.evictions)
            )
        self._num_steps.inc()
        self._active.labels("device").inc(hits)
        self._active.labels("host").inc(residual)
        for kind in ("promotions", "evictions", "wasted_promotions"):
            self._moves.labels(kind).inc(getattr(moves, kind))
        self._link.inc(moves.link_bytes)
        for name, ms in zip(("gpu", "io", "cpu"), parts, strict=True):
            self._time.labels(name).inc(ms / 1e3)
        if (rate := self._rate()) is not None:
            self._hit_rate.set(rate)

    def _rate(self) -> float | None:
        active = self._hits + self._residual
        return round(self._hits / active, 6) if active else None

    def _neurons_per_bin(self) -> float:
        if self._engine is None or not self._residency.size:
            return 0.0
        return self._engine.config.num_neurons / self._residency.shape[1]

    def _look(self, now: float) -> None:
        """Take a picture of the slot table and ask the policy, on the thread that changes them."""
        if self._engine is None:
            return
        resident = self._engine.residency()
        report = self._engine.policy_report()
        with self._lock:
            self._residency, self._policy = binned(resident), report
        self._resident.set(int(resident.sum()))
        self._looked_at = now


def binned(resident: Bool[np.ndarray, "L F"]) -> Int[np.ndarray, "L bins"]:
    """Return the share of resident neurons in each of at most ``MAX_BINS`` equal pieces of a layer, in per cent."""
    num_neurons = resident.shape[1]
    edges = np.linspace(0, num_neurons, min(MAX_BINS, num_neurons) + 1).astype(int)
    counts = np.add.reduceat(resident.astype(np.int32), edges[:-1], axis=1)
    return np.rint(100 * counts / np.diff(edges)).astype(np.int32)
