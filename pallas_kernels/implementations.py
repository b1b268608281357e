"""Which implementation of an operation a call runs, and the error where it cannot run."""

from __future__ import annotations

from typing import Literal

import jax

Implementation = Literal["auto", "xla", "pallas", "triton"]
IMPLEMENTATIONS: tuple[str, ...] = ("auto", "xla", "pallas", "triton")
_CUDA_NAMES = ("cuda", "gpu")  # jax.default_backend() says "gpu", lowering platforms say "cuda"


def resolve_implementation(
    implementation: str, platform: str | None = None, *, interpret: bool = False
) -> Literal["xla", "pallas", "triton"]:
    """Choose the implementation that a call on ``platform`` runs.

    "auto" means "pallas" on CUDA and "xla" everywhere else.

    Args:
        implementation: one of ``IMPLEMENTATIONS``.
        platform: "cuda", "gpu", "cpu", ...; None means ``jax.default_backend()``.
        interpret: True where the caller runs Pallas kernels in the interpreter (any platform, slow).

    Returns:
        The implementation's name, never "auto".

    Raises:
        ValueError: the name is unknown, or the implementation does not run on ``platform``.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation {implementation!r} is unknown: use one of {', '.join(IMPLEMENTATIONS)}"
        )
    platform = jax.default_backend() if platform is None else platform
    on_cuda = platform in _CUDA_NAMES
    if interpret and implementation != "pallas":
        raise ValueError(f"interpret=True applies to implementation='pallas', not to {implementation!r}")
    if implementation == "auto":
        return "pallas" if on_cuda else "xla"
    if implementation == "xla":
        return "xla"
    if not on_cuda and not interpret:
        remedy = "use 'auto' or 'xla'" + (", or interpret=True" if implementation == "pallas" else "")
        raise ValueError(f"implementation {implementation!r} needs a CUDA device, not {platform!r}: {remedy}")
    return "pallas" if implementation == "pallas" else "triton"
