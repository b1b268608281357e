"""Public entry of ``gather_gate_up``: checks, and the choice of the implementation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.block_rows import Rows, row_format
from pallas_kernels.gather_gate_up import pallas, xla
from pallas_kernels.implementations import load_twin, resolve_implementation
from pallas_kernels.rules import check_rule
from pallas_kernels.slots import check_selection


def gather_gate_up(
    x: Float[Array, "B D"],
    gate: Rows | None,
    up: Rows,
    slots: Int32[Array, " K"] | None,
    n: Int32[Array, ""] | None,
    *,
    rule: str,
    threshold: float | Float[Array, ""] | None,
    valid: Bool[Array, " C"] | None = None,
    biases: tuple[Float[Array, " C"] | None, Float[Array, " C"]] | None = None,
    implementation: str = "auto",
    platform: str | None = None,
    interpret: bool = False,
) -> Float[Array, "B K"]:
    """Compute the activated values of FFN neurons that live in device slots.

    Two ways to select slots. A list: the first ``n`` entries of ``slots`` (the union over the batch; the rule
    masks each row by itself). A mask: ``slots=None, n=None`` and ``valid``, which evaluates slots 0..C-1
    where ``valid`` holds, without a gather; on XLA's CPU backend that is faster once more than a third of
    the slots are evaluated.

    Args:
        x: FFN input, [B, D], B 1..8, any float dtype.
        gate: gate rows of the slots, [C, D] in float32, bfloat16 or float16, or ``BlockRows`` (q8_0, q4_0);
            None for an ungated model.
        up: up rows of the slots, like ``gate``.
        slots: int32 [K], distinct; entries outside 0..C-1 are skipped. None selects by ``valid``.
        n: int32 scalar on the device: how many entries of ``slots`` count (0..K).
        rule: one of ``RULES``: "silu", z = silu(g) u where |z| > threshold, with the size
            min(|z|, 3 (|z| - threshold)); "relu", relu(g) u;
            "relu2", relu(g)^2 u; "fatrelu", g u where g > threshold; "drelu", relu(g) relu(u).
            Ungated: the rule of the up product alone.
        threshold: number or float32 scalar array for "silu" and "fatrelu"; None or 0.0 for the others.
        valid: bool [C], with ``slots=None``: the slots to evaluate (empty ones must be False).
        biases: (gate bias or None, up bias), each [C], added to the products.
        implementation: "auto", "xla", "pallas" or "triton"; see ``resolve_implementation``.
        platform: platform the call is compiled for; None means ``jax.default_backend()``.
        interpret: run the Pallas kernel in the interpreter (any platform; for tests).

    Returns:
        float32 [B, K] ([B, C] by mask), 0 for unlisted and for inactive slots.

    Raises:
        ValueError: shapes, selection, rule, threshold or implementation do not fit.

    Source:
        design section "One decode step", item 4.
    """
    chosen = resolve_implementation(implementation, platform, interpret=interpret)
    check_rule(rule, gated=gate is not None, threshold=threshold)
    check_selection(slots, n, valid)
    _check_shapes(x, gate, up, valid, biases)
    limit = jnp.asarray(0.0 if threshold is None else threshold, jnp.float32)
    run = {
        "xla": lambda: xla.gather_gate_up,
        "pallas": lambda: functools.partial(pallas.gather_gate_up, interpret=interpret),
        "triton": lambda: load_twin("gather_gate_up").gather_gate_up,
    }[chosen]()
    return run(x, gate, up, slots=slots, n=n, valid=valid, rule=rule, threshold=limit, biases=biases)


def _check_shapes(
    x: jax.Array,
    gate: Rows | None,
    up: Rows,
    valid: jax.Array | None,
    biases: tuple[jax.Array | None, jax.Array] | None,
) -> None:
    if x.ndim != 2 or len(up.shape) != 2 or x.shape[1] != up.shape[1]:
        raise ValueError(f"x {x.shape} and up {up.shape} do not fit: expected [B, D] and [C, D]")
    if not 1 <= x.shape[0] <= 8:
        raise ValueError(f"batch {x.shape[0]} is outside 1..8: use the dense product for larger batches")
    if gate is not None and (gate.shape != up.shape or row_format(gate) != row_format(up)):
        kinds = f"gate {gate.shape} {row_format(gate)} and up {up.shape} {row_format(up)}"
        raise ValueError(f"{kinds} differ: both are [C, D] of one format")
    if valid is not None and valid.shape != up.shape[:1]:
        raise ValueError(f"valid {valid.shape} does not fit {up.shape[0]} slots: expected [C]")
    if biases is not None and (biases[0] is None) != (gate is None):
        raise ValueError(
            "biases do not fit the rows: a gate bias is needed exactly where there are gate rows"
        )
