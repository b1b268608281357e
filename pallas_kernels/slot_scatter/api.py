"""Public entry of ``slot_scatter``: checks, and the choice of the implementation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.block_rows import BlockRows, Rows, row_format, split_blocks
from pallas_kernels.implementations import resolve_implementation
from pallas_kernels.slot_scatter import pallas, xla


def slot_scatter(
    cache: tuple[Rows, ...],
    staging: Shaped[Array, "M R row"],
    slots: Int32[Array, " M"],
    *,
    implementation: str = "auto",
    platform: str | None = None,
    interpret: bool = False,
) -> tuple[Rows, ...]:
    """Write record m of the staging buffer into slot ``slots[m]`` of every array of a layer's cache.

    Rows whose slot lies outside 0..C-1 are dropped: pad a transfer to a fixed M with slot C. Slots inside the
    cache must be distinct. Donate the cache in the caller's jit (``donate_argnums``): then the update is in
    place with no temporary; without donation it copies the whole cache.

    Args:
        cache: R arrays [C, D] (gate, up, down; ungated: up, down), all dense of one dtype, or all
            ``BlockRows`` of one format.
        staging: [M, R, D] of the cache's dtype; record m's rows lie together. For ``BlockRows`` uint8
            [M, R, row_bytes], the GGUF bytes of the rows; they are split on the device.
        slots: int32 [M].
        implementation: "auto", "xla", "pallas" or "triton"; see ``resolve_implementation``.
        platform: platform the call is compiled for; None means ``jax.default_backend()``.
        interpret: run the Pallas kernel in the interpreter (any platform; for tests).

    Returns:
        The updated cache.

    Raises:
        ValueError: shapes, formats or implementation do not fit, or there is no such form ("triton").
        TypeError: staging is not of the dtype that the cache needs.
    """
    chosen = resolve_implementation(implementation, platform, interpret=interpret)
    if chosen == "triton" and implementation == "auto":
        chosen = "xla"  # a JAX without Pallas-Triton; there is no twin of a plain copy
    if chosen == "triton":
        raise ValueError("slot_scatter has no 'triton' form: use 'pallas' or 'xla'")
    _check_cache(cache)
    scatter = (
        xla.slot_scatter if chosen == "xla" else functools.partial(pallas.slot_scatter, interpret=interpret)
    )
    blocks = tuple(rows for rows in cache if isinstance(rows, BlockRows))
    if not blocks:
        dense = tuple(rows for rows in cache if not isinstance(rows, BlockRows))
        _check_staging(cache, staging, slots, staging.dtype, dense[0].dtype)
        return scatter(dense, staging, slots)
    staged = split_blocks(staging, row_format(blocks[0]))
    _check_staging(cache, staged, slots, staging.dtype, jnp.dtype("uint8"))
    per_record = staging.shape[:2]  # (M, R)
    flat = tuple(rows.codes.reshape(rows.shape[0], -1) for rows in blocks)  # [C, bytes], no copy
    codes = scatter(flat, staged.codes.reshape(*per_record, -1), slots)
    scales = scatter(tuple(rows.scales for rows in blocks), staged.scales, slots)
    minima: tuple[jax.Array | None, ...] = (None,) * len(blocks)
    least = tuple(rows.minima for rows in blocks if rows.minima is not None)
    if staged.minima is not None:
        minima = tuple(scatter(least, staged.minima, slots))
    return tuple(
        BlockRows(code.reshape(rows.codes.shape), scale, low)
        for code, scale, low, rows in zip(codes, scales, minima, blocks, strict=True)
    )


def _check_cache(cache: tuple[Rows, ...]) -> None:
    kinds = [(rows.shape, row_format(rows)) for rows in cache]
    if len(set(kinds)) > 1:
        raise ValueError(f"cache arrays differ: {kinds}; all are [C, D] of one format")


def _check_staging(
    cache: tuple[Rows, ...], staged: Rows, slots: jax.Array, dtype: jnp.dtype, needed: jnp.dtype
) -> None:
    if dtype != needed:
        raise TypeError(
            f"staging is {dtype}, a {row_format(cache[0])} cache needs {needed}: convert on the host"
        )
    expected = (slots.shape[0], len(cache), cache[0].shape[1])
    if staged.shape != expected:
        raise ValueError(f"staging holds {staged.shape} weights: expected [M, R, D] = {expected}")
