"""How many bytes a decode step reads, from layouts and counts: what bounds its speed on a CPU.

Pure functions without JAX, so that the process that runs llama.cpp can use them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class TouchedBytes:
    """Bytes that one decoded token reads.

    Attributes:
        other_weights: attention, norms, one row of the embedding, output matrix, predictors.
        host_neurons: records read on the host.
        device_neurons: records read from device slots.
        kv_cache: keys and values.
    """

    other_weights: float
    host_neurons: float
    device_neurons: float
    kv_cache: float

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(asdict(self).values())

    def to_json(self) -> dict[str, int]:
        """Return the parts and the total in whole bytes; the total is the sum of the rounded parts."""
        parts = {name: round(size) for name, size in asdict(self).items()}
        return {**parts, "total": sum(parts.values())}


def neuron_bytes(evaluated: float, active: float, row_bytes: Sequence[int], *, always: int) -> float:
    """Return the bytes that one layer reads of its records.

    Args:
        evaluated: neurons whose activity is computed.
        active: of these, the neurons that count.
        row_bytes: of a record's rows in order: gate, up, down.
        always: how many rows, from the first, are read of every evaluated neuron; the rest of the active.

    Raises:
        ValueError: more active than evaluated neurons, or more rows than a record has.
    """
    if not 0 <= active <= evaluated:
        raise ValueError(
            f"{active} active of {evaluated} evaluated neurons: expected 0 <= active <= evaluated"
        )
    if not 0 <= always <= len(row_bytes):
        raise ValueError(f"{always} rows read of a record with {len(row_bytes)}: expected at most as many")
    return evaluated * sum(row_bytes[:always]) + active * sum(row_bytes[always:])


def seen_positions(prompt_tokens: int, steps: int) -> list[int]:
    """Return how many cached positions each decode step attends to, its own included."""
    return [prompt_tokens + step + 1 for step in range(steps)]


def cache_bytes(positions: Sequence[int], bytes_per_position: int) -> float:
    """Return the mean bytes of keys and values that a step reads.

    Args:
        positions: cached positions read by each step.
        bytes_per_position: of all layers, keys and values.
    """
    return float(np.mean(positions)) * bytes_per_position
