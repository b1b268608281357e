"""Which implementation of an operation a call runs, and the error where it cannot run."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Literal

import jax

Implementation = Literal["auto", "xla", "pallas", "triton"]
IMPLEMENTATIONS: tuple[str, ...] = ("auto", "xla", "pallas", "triton")
_CUDA_NAMES = ("cuda", "gpu")  # jax.default_backend() says "gpu", lowering platforms say "cuda"


def resolve_implementation(
    implementation: str, platform: str | None = None, *, interpret: bool = False
) -> Literal["xla", "pallas", "triton"]:
    """Choose the implementation that a call on ``platform`` runs.

    "auto" means "xla" off CUDA, and on CUDA "pallas", or "triton" where this JAX has no Pallas-Triton any more.

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
        return ("pallas" if has_pallas_triton() else "triton") if on_cuda else "xla"
    if implementation == "xla":
        return "xla"
    if not on_cuda and not interpret:
        remedy = "use 'auto' or 'xla'" + (", or interpret=True" if implementation == "pallas" else "")
        raise ValueError(f"implementation {implementation!r} needs a CUDA device, not {platform!r}: {remedy}")
    return "pallas" if implementation == "pallas" else "triton"


def has_pallas_triton() -> bool:
    """Say whether this JAX still has the Triton backend of Pallas, which is deprecated from 0.11 on."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def load_twin(op: str) -> Any:
    """Import the Triton form of an operation, which needs optional packages.

    Args:
        op: folder of the operation.

    Raises:
        ValueError: jax-triton or triton is not installed, or jax-triton finds no JAX with GPU support.
    """
    try:
        importlib.import_module("jax_triton")
        return importlib.import_module(f"pallas_kernels.{op}.triton")
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"implementation 'triton' needs jax-triton ({reason}): pip install 'kairox-jax[cuda]', or use 'pallas'"
        ) from None
