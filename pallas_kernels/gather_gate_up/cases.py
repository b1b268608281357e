"""Inputs of ``gather_gate_up``: edge cases and widths of real models, for tests, tuning and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pallas_kernels.block_rows import FORMATS
from pallas_kernels.rules import THRESHOLD_RULES
from pallas_kernels.shapes import LLAMA_7B, LLAMA_13B, SMOLLM2_135M


@dataclass(frozen=True, kw_only=True)
class GateUpCase:
    """One input. ``c`` slots, ``k`` list entries of which ``n`` count; ``holes``: every third one is -1.

    ``active`` shifts the gate products by a bias: "some", "none" or "all" neurons active.
    """

    name: str
    b: int = 1
    c: int = 64
    d: int = 64
    k: int = 48
    n: int = 40
    rule: str = "relu"
    gated: bool = True
    biases: bool = False
    active: str = "some"
    holes: bool = False
    dtype: str = "float32"


_BASE = GateUpCase(name="base")
_RULES = [replace(_BASE, name=rule, rule=rule) for rule in ("silu", "relu", "relu2", "fatrelu", "drelu")]
_UNGATED = [
    replace(_BASE, name=f"{rule}-ungated", rule=rule, gated=False)
    for rule in ("silu", "relu", "relu2", "fatrelu")
]
_EDGES = [
    replace(_BASE, name="size-1", c=1, d=1, k=1, n=1),
    replace(_BASE, name="ragged-tail", c=37, d=100, k=21, n=19),
    replace(_BASE, name="all-cold", n=0),
    replace(_BASE, name="all-hot", k=64, n=64),
    replace(_BASE, name="none-active", biases=True, active="none"),
    replace(_BASE, name="all-active", biases=True, active="all"),
    replace(_BASE, name="holes", holes=True),
    replace(_BASE, name="biases", biases=True),
    replace(_BASE, name="biases-ungated", biases=True, gated=False),
    replace(_BASE, name="batch-3", b=3),
    replace(_BASE, name="batch-8-silu", b=8, rule="silu"),
    replace(_BASE, name="batch-8-ragged", b=8, d=100, n=17),
]
_WIDTHS = [
    replace(_BASE, name=shape.name, d=shape.d, c=40, k=24, n=18, rule=rule)
    for shape, rule in ((SMOLLM2_135M, "silu"), (LLAMA_7B, "relu"), (LLAMA_13B, "fatrelu"))
]
_DTYPES = [replace(_BASE, name=dtype, dtype=dtype, b=2) for dtype in ("bfloat16", "float16", *FORMATS)]
CASES = (*_RULES, *_UNGATED, *_EDGES, *_WIDTHS, *_DTYPES)


def make_inputs(case: GateUpCase, rng: np.random.Generator) -> dict[str, np.ndarray | None]:
    """Draw x, gate, up, slots, n, gate_bias and up_bias (float32, int32) of a case."""
    shift = {"some": 0.0, "none": -100.0, "all": 100.0}[case.active]
    first_bias = rng.normal(size=case.c) + shift
    other_bias = rng.normal(size=case.c)
    slots = rng.permutation(case.c)[: case.k].astype(np.int32)
    if case.holes:
        slots[::3] = -1
    scale = case.d**-0.5
    return {
        "x": rng.normal(size=(case.b, case.d)).astype(np.float32),
        "gate": (rng.normal(size=(case.c, case.d)) * scale).astype(np.float32) if case.gated else None,
        "up": (rng.normal(size=(case.c, case.d)) * scale).astype(np.float32),
        "slots": slots,
        "n": np.asarray(case.n, np.int32),
        "gate_bias": first_bias.astype(np.float32) if case.biases and case.gated else None,
        "up_bias": (other_bias if case.gated else first_bias).astype(np.float32) if case.biases else None,
    }


def gap_threshold(case: GateUpCase, scores: np.ndarray) -> float:
    """Return a threshold in the widest gap among the middle scores, so that rounding flips no decision.

    Args:
        case: names the rule; rules without a threshold get 0.0.
        scores: what the rule compares with the threshold, any shape.
    """
    if case.rule not in THRESHOLD_RULES:
        return 0.0
    ordered = np.sort(scores[scores > 0].ravel())
    if ordered.size < 2:
        return 0.0
    middle = ordered[ordered.size // 4 : max(3 * ordered.size // 4, ordered.size // 4 + 2)]
    widest = int(np.argmax(np.diff(middle)))
    return float(middle[widest : widest + 2].mean())
