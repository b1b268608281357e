"""Public entry of ``gather_down``: checks, and the choice of the implementation."""

from __future__ import annotations

from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.block_rows import ColumnRows, Rows
from pallas_kernels.gather_down import pallas, xla
from pallas_kernels.implementations import load_twin, resolve_implementation
from pallas_kernels.slots import check_selection


def gather_down(
    values: Float[Array, "B K"],
    down: Rows | ColumnRows,
    slots: Int32[Array, " K"] | None,
    n: Int32[Array, ""] | None,
    *,
    deterministic: bool,
    valid: Bool[Array, " C"] | None = None,
    implementation: str = "auto",
    platform: str | None = None,
    interpret: bool = False,
) -> Float[Array, "B D"]:
    """Sum the down rows of device slots, weighted by the values of ``gather_gate_up``, in float32.

    Rows whose value is 0 in the whole batch are not read by the kernels. XLA multiplies other rows by 0, so
    that every slot must hold finite numbers (a new cache is all zeros).

    Args:
        values: float32 [B, K] ([B, C] by mask), B 1..8.
        down: down rows of the slots, [C, D] in float32, bfloat16 or float16, or ``BlockRows``
            (the transposed columns of the usual [D, F] matrix), or ``ColumnRows``: codes whose scales
            columns share; D is then padded to a multiple of 32, and so is the result.
        slots: int32 [K], distinct; entries outside 0..C-1 are skipped. None selects by ``valid``.
        n: int32 scalar on the device: how many entries of ``slots`` count.
        deterministic: True sums partial results in a fixed order, so that equal arguments give equal bits.
            False lets the Pallas kernel add them with atomics (one launch fewer). XLA and Triton are always so.
        valid: bool [C], with ``slots=None``: the slots to sum.
        implementation: "auto", "xla", "pallas" or "triton"; see ``resolve_implementation``.
        platform: platform the call is compiled for; None means ``jax.default_backend()``.
        interpret: run the Pallas kernel in the interpreter (any platform; for tests).

    Returns:
        float32 [B, D].

    Raises:
        ValueError: shapes, selection or implementation do not fit.

    Source:
        design section "One decode step", item 4.
    """
    chosen = resolve_implementation(implementation, platform, interpret=interpret)
    check_selection(slots, n, valid)
    selected = down.shape[0] if slots is None else slots.shape[0]
    if values.ndim != 2 or values.shape[1] != selected:
        raise ValueError(
            f"values {values.shape} do not fit {selected} selected slots: expected [B, {selected}]"
        )
    if not 1 <= values.shape[0] <= 8:
        raise ValueError(f"batch {values.shape[0]} is outside 1..8: use the dense product for larger batches")
    if valid is not None and valid.shape != down.shape[:1]:
        raise ValueError(f"valid {valid.shape} does not fit {down.shape[0]} slots: expected [C]")
    if chosen == "triton":
        return load_twin("gather_down").gather_down(values, down, slots=slots, n=n, valid=valid)
    if chosen == "xla":
        return xla.gather_down(values, down, slots=slots, n=n, valid=valid)
    return pallas.gather_down(
        values, down, slots=slots, n=n, valid=valid, deterministic=deterministic, interpret=interpret
    )
