"""Inputs of ``slot_scatter``: edge cases and widths of real models, for tests, tuning and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pallas_kernels.shapes import LLAMA_7B, SMOLLM2_135M


@dataclass(frozen=True, kw_only=True)
class ScatterCase:
    """One input: ``m`` staged records, the first ``used`` go to distinct slots, the rest is padding."""

    name: str
    r: int = 3
    c: int = 32
    d: int = 64
    m: int = 8
    used: int = 5
    padding_slot: int | None = None  # None: slot c
    dtype: str = "float32"


_BASE = ScatterCase(name="base")
CASES = (
    _BASE,
    replace(_BASE, name="size-1", r=2, c=1, d=1, m=1, used=1),
    replace(_BASE, name="ragged-tail", d=100, c=7, m=5, used=4),
    replace(_BASE, name="all-padding", used=0),
    replace(_BASE, name="negative-padding", padding_slot=-1),
    replace(_BASE, name="every-slot", m=32, used=32),
    replace(_BASE, name="ungated", r=2),
    replace(_BASE, name="bytes", dtype="uint8", d=100),
    replace(_BASE, name="bfloat16", dtype="bfloat16"),
    replace(_BASE, name="q8_0", dtype="q8_0"),
    replace(_BASE, name="q4_0", dtype="q4_0", r=2),
    replace(_BASE, name="q4_1", dtype="q4_1"),
    *(replace(_BASE, name=s.name, d=s.d) for s in (SMOLLM2_135M, LLAMA_7B)),
)


def make_inputs(
    case: ScatterCase, rng: np.random.Generator
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Draw the cache (R arrays [C, D]), staging [M, R, D] and slots int32 [M]: numbers exact in any dtype."""
    cache = [rng.integers(0, 200, (case.c, case.d)).astype(np.float32) for _ in range(case.r)]
    staging = rng.integers(0, 200, (case.m, case.r, case.d)).astype(np.float32)
    padding = case.c if case.padding_slot is None else case.padding_slot
    slots = np.full(case.m, padding, np.int32)
    slots[: case.used] = rng.permutation(case.c)[: case.used]
    return cache, staging, slots
