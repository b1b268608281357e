"""What one pass through the layers found, and what a step reports of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from kairox_jax.balancing import Times
from kairox_jax.engine.migrate import MoveCounts


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """What one step computed where, and how long it took.

    Attributes:
        active: which neurons counted for any of the sequences, bool [L, F].
        share: for how many of them, as a share, float32 [L, F]; None where there was one.
        predicted: neurons that were forecast, all layers, mean over the sequences; None without forecasts.
        hits, residual: of these, computed on the device and on the host, int [L].
        times: of the whole step.
        moves: what moved since the step before.
    """

    active: Bool[np.ndarray, "L F"]
    share: Float[np.ndarray, "L F"] | None
    predicted: float | None
    hits: Int[np.ndarray, " L"]
    residual: Int[np.ndarray, " L"]
    times: Times
    moves: MoveCounts


@dataclass
class Pass:
    """What one pass through all layers found.

    Attributes:
        users: for how many sequences each neuron was active, uint8 [L, F]; at first those of the host alone.
        masks: which slots were active, [n, C] a layer on the device, or None.
        gpu_ms, cpu_ms: of each layer.
        evaluated: neurons that the host evaluated.
        predicted: neurons that were forecast, all layers and sequences.
        logits: [n, V].
    """

    users: UInt8[np.ndarray, "L F"]
    masks: list[Any] = field(default_factory=list)
    gpu_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    evaluated: int = 0
    predicted: int = 0
    logits: Any = None
