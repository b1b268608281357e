"""Generated traces at any scale, whose statistics are fitted to a real trace.

A neuron is active when popularity + drift + burst + token exceeds 0 plus logistic noise. Popularity is fixed
for a neuron (normal), drift and burst are slow and fast autoregressions of it, token is shared by all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from kairox_jax.io.trace import Trace

DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class GeneratorSettings:
    """Parameters of the generator; the defaults are fitted to the SmolLM2 traces (docs/policies.md).

    Attributes:
        bias: log-odds of a neuron of middling popularity.
        popularity: standard deviation of log-odds among neurons.
        drift: of the slow part; ``drift_decay`` is what is left of it after a step.
        burst: of the fast part; ``burst_decay`` likewise.
        token: of the part that all neurons of a token share.
    """

    bias: float = -1.65
    popularity: float = 0.6
    drift: float = 0.7
    drift_decay: float = 0.99
    burst: float = 0.45
    burst_decay: float = 0.75
    token: float = 0.3

    def __post_init__(self) -> None:
        for name in ("drift_decay", "burst_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be in [0, 1)")
        for name in ("popularity", "drift", "burst", "token"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} must be 0 or more")


@dataclass(frozen=True)
class TraceStatistics:
    """What a generated trace should share with a real one.

    Attributes:
        density: mean share of active neurons.
        spread: standard deviation of a neuron's frequency over the trace.
        reactivation: P(active d steps later | active), for each d of ``DISTANCES``.
        token_spread: standard deviation of the density of a token, over the density.
    """

    density: float
    spread: float
    reactivation: np.ndarray
    token_spread: float

    def distance(self, other: TraceStatistics) -> float:
        """Return the sum of squared differences, relative where the size is not a probability."""
        return float(
            ((self.reactivation - other.reactivation) ** 2).sum()
            + (self.density / other.density - 1) ** 2
            + (self.spread / other.spread - 1) ** 2
            + (self.token_spread / other.token_spread - 1) ** 2
        )


def measure(active: np.ndarray) -> TraceStatistics:
    """Return the statistics of activations bool [steps, L, F]."""
    later = [
        (active[:-gap] & active[gap:]).sum() / max(active[:-gap].sum(), 1)
        for gap in DISTANCES
        if gap < len(active)
    ]
    per_token = active.mean((1, 2))
    density = float(active.mean())
    return TraceStatistics(
        density, float(active.mean(0).std()), np.array(later), float(per_token.std() / max(density, 1e-9))
    )


def generate(
    settings: GeneratorSettings,
    *,
    num_layers: int,
    num_neurons: int,
    num_steps: int,
    seed: int,
    switch_at: int | None = None,
    switch_frac: float = 0.5,
) -> Trace:
    """Return a generated trace.

    Args:
        settings: statistics.
        num_layers, num_neurons, num_steps: L, F, steps.
        seed: the same seed gives the same trace.
        switch_at: a step at which the topic changes: this share of the neurons gets a new popularity.
        switch_frac: that share, in 0..1.
    """
    rng, rows = np.random.default_rng(seed), []
    for popularity, drift, burst, shared in _parts(
        settings, rng, (num_layers, num_neurons), num_steps, switch_at, switch_frac
    ):
        log_odds = popularity + settings.drift * drift + settings.burst * burst + shared
        rows.append(
            np.packbits(rng.random(log_odds.shape, np.float32) < 1 / (1 + np.exp(-log_odds)), axis=-1)
        )
    meta: dict[str, Any] = {"generated": asdict(settings), "seed": seed, "switch_at": switch_at}
    return Trace(np.stack(rows), num_neurons, None, meta, f"generated-{seed}")


def hidden_parts(
    settings: GeneratorSettings, *, num_layers: int, num_neurons: int, num_steps: int, seed: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return popularity, drift and burst of each step, float32 [L, F], of the trace that ``generate`` returns.

    Args:
        settings, num_layers, num_neurons, num_steps, seed: as for ``generate``, without a switch.
    """
    rng, found, size = np.random.default_rng(seed), [], (num_layers, num_neurons)
    for popularity, drift, burst, _ in _parts(settings, rng, size, num_steps, None, 0.0):
        rng.random(size, np.float32)  # what makes ``generate``'s neurons active
        found.append((popularity, drift, burst))
    return found


def _parts(
    settings: GeneratorSettings,
    rng: np.random.Generator,
    size: tuple[int, int],
    num_steps: int,
    switch_at: int | None,
    switch_frac: float,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.float32]]:
    """Yield popularity, drift, burst and the token's part of each step; between steps the caller draws once."""
    popularity = settings.bias + settings.popularity * rng.standard_normal(size, np.float32)
    drift, burst = rng.standard_normal(size, np.float32), rng.standard_normal(size, np.float32)
    slow, fast = np.float32(settings.drift_decay), np.float32(settings.burst_decay)
    for step in range(num_steps):
        if step == switch_at:
            fresh = settings.bias + settings.popularity * rng.standard_normal(size, np.float32)
            popularity = np.where(rng.random(size, np.float32) < switch_frac, fresh, popularity)
        drift = slow * drift + np.sqrt(1 - slow**2) * rng.standard_normal(size, np.float32)
        burst = fast * burst + np.sqrt(1 - fast**2) * rng.standard_normal(size, np.float32)
        yield popularity, drift, burst, np.float32(settings.token * rng.standard_normal())


def fit(
    trace: Trace, *, start: GeneratorSettings | None = None, trials: int = 150, seed: int = 0
) -> GeneratorSettings:
    """Return settings whose traces have the statistics of ``trace``: a random search that narrows.

    Args:
        trace: real activations.
        start: where the search begins.
        trials: settings that are tried.
        seed: of the search and of the trial traces.
    """
    steps = min(trace.num_steps, 300)
    target = measure(np.stack([trace.active(step) for step in range(steps)]))
    rng = np.random.default_rng(seed)
    best = start or GeneratorSettings()
    best_distance = _trial(best, steps, seed).distance(target)
    for trial in range(trials):
        width = 0.4 * (1 - trial / trials) + 0.02
        other = _mutated(best, rng, width)
        distance = _trial(other, steps, seed).distance(target)
        if distance < best_distance:
            best, best_distance = other, distance
    return best


def _trial(settings: GeneratorSettings, steps: int, seed: int) -> TraceStatistics:
    trace = generate(settings, num_layers=1, num_neurons=1024, num_steps=steps, seed=seed)
    return measure(np.stack([trace.active(step) for step in range(steps)]))


def _mutated(settings: GeneratorSettings, rng: np.random.Generator, width: float) -> GeneratorSettings:
    changed = {}
    for entry in fields(settings):
        value, noise = getattr(settings, entry.name), width * rng.standard_normal()
        if entry.name.endswith("_decay"):  # of the time that the part lasts
            value = 1 - min(max((1 - value) * np.exp(noise), 1e-3), 0.9)
        else:
            value = value * float(np.exp(noise))
        changed[entry.name] = round(float(value), 4)
    return replace(settings, **changed)
