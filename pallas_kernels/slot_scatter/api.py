"""Public entry of ``slot_scatter``: checks, and the choice of the implementation."""

from __future__ import annotations

from jaxtyping import Array, Int32, Shaped

from pallas_kernels.implementations import resolve_implementation
from pallas_kernels.slot_scatter import pallas, xla


def slot_scatter(
    cache: tuple[Shaped[Array, "C D"], ...],
    staging: Shaped[Array, "M R D"],
    slots: Int32[Array, " M"],
    *,
    implementation: str = "auto",
    platform: str | None = None,
    interpret: bool = False,
) -> tuple[Shaped[Array, "C D"], ...]:
    """Write record m of the staging buffer into slot ``slots[m]`` of every array of a layer's cache.

    Rows whose slot lies outside 0..C-1 are dropped: pad a transfer to a fixed M with slot C. Slots inside the
    cache must be distinct. Donate the cache in the caller's jit (``donate_argnums``): then the update is in
    place with no temporary; without donation it copies the whole cache.

    Args:
        cache: R arrays [C, D] (gate, up, down; ungated: up, down), one dtype.
        staging: [M, R, D] of the cache's dtype; record m's rows lie together.
        slots: int32 [M].
        implementation: "auto", "xla", "pallas" or "triton"; see ``resolve_implementation``.
        platform: platform the call is compiled for; None means ``jax.default_backend()``.
        interpret: run the Pallas kernel in the interpreter (any platform; for tests).

    Returns:
        The updated cache.

    Raises:
        ValueError: shapes or implementation do not fit, or there is no such form ("triton").
        TypeError: staging and cache differ in dtype.
    """
    chosen = resolve_implementation(implementation, platform, interpret=interpret)
    expected = (slots.shape[0], len(cache), *cache[0].shape[1:])
    if staging.shape != expected:
        raise ValueError(f"staging {staging.shape} does not fit: expected [M, R, D] = {expected}")
    if any(rows.shape != cache[0].shape for rows in cache):
        raise ValueError(f"cache arrays differ in shape: {[rows.shape for rows in cache]}; all are [C, D]")
    if any(rows.dtype != staging.dtype for rows in cache):
        raise TypeError(
            f"staging is {staging.dtype}, cache {cache[0].dtype}: convert the records on the host"
        )
    if chosen == "triton":
        raise ValueError("slot_scatter has no 'triton' form: use 'pallas' or 'xla'")
    if chosen == "xla":
        return xla.slot_scatter(cache, staging, slots)
    return pallas.slot_scatter(cache, staging, slots, interpret=interpret)
