"""Inputs of ``gather_down``: edge cases and widths of real models, for tests, tuning and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pallas_kernels.block_rows import FORMATS as BLOCKED
from pallas_kernels.shapes import LLAMA_7B, LLAMA_13B, SMOLLM2_135M


@dataclass(frozen=True, kw_only=True)
class DownCase:
    """One input: ``c`` slots, ``k`` list entries of which ``n`` count, a share ``active_frac`` non-zero."""

    name: str
    b: int = 1
    c: int = 64
    d: int = 64
    k: int = 48
    n: int = 40
    active_frac: float = 0.5
    holes: bool = False
    dtype: str = "float32"


COLUMNS = tuple(f"{name}_column" for name in BLOCKED)
_BASE = DownCase(name="base")
CASES = (
    _BASE,
    replace(_BASE, name="size-1", c=1, d=1, k=1, n=1, active_frac=1.0),
    replace(_BASE, name="ragged-tail", c=37, d=100, k=21, n=19),
    replace(_BASE, name="all-cold", n=0),
    replace(_BASE, name="none-active", active_frac=0.0),
    replace(_BASE, name="all-hot", k=64, n=64, active_frac=1.0),
    replace(_BASE, name="more-chunks-than-parts", c=400, k=400, n=390),
    replace(_BASE, name="holes", holes=True),
    replace(_BASE, name="batch-3", b=3),
    replace(_BASE, name="batch-8-ragged", b=8, d=100, n=17),
    *(replace(_BASE, name=s.name, d=s.d, c=40, k=24, n=18) for s in (SMOLLM2_135M, LLAMA_7B, LLAMA_13B)),
    *(replace(_BASE, name=dtype, dtype=dtype, b=2) for dtype in ("bfloat16", "float16", *BLOCKED, *COLUMNS)),
    replace(_BASE, name="column-ragged", dtype="q4_1_column", c=50, d=100),
    replace(_BASE, name="column-7b", dtype="q8_0_column", d=LLAMA_7B.d, c=40, k=24, n=18),
)


def make_inputs(case: DownCase, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw values, down, slots and n (float32, int32) of a case."""
    slots = rng.permutation(case.c)[: case.k].astype(np.int32)
    if case.holes:
        slots[::3] = -1
    active = rng.random((case.b, case.k)) < case.active_frac
    return {
        "values": np.where(active, rng.normal(size=active.shape), 0.0).astype(np.float32),
        "down": rng.normal(size=(case.c, case.d)).astype(np.float32),
        "slots": slots,
        "n": np.asarray(case.n, np.int32),
    }
