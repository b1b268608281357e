"""How a GGUF file stretches its rotary frequencies."""

from __future__ import annotations

import numpy as np

from kairox_jax.config import RopeScaling
from kairox_jax.io.errors import FormatError
from kairox_jax.io.gguf_fields import get_field
from kairox_jax.io.gguf_file import GgufFile
from kairox_jax.io.weights import unpack

_FACTORS = "rope_freqs.weight"
_NOT_SUPPORTED = {
    "yarn": "it also rescales attention",
    "longrope": "it switches frequencies with the length of the text",
}


def gguf_rope_scaling(file: GgufFile, arch: str, head_dim: int) -> RopeScaling | None:
    """Read ``{arch}.rope.scaling.*``, the old key ``rope.scale_linear`` and the tensor ``rope_freqs``.

    Args:
        file: an open file.
        arch: its architecture.
        head_dim: H.

    Returns:
        None where the frequencies stay as they are.

    Raises:
        FormatError: a kind that is not supported, or broken factors.

    Source: llama.cpp: ``rope.scaling.type`` is linear where it is missing, its factor 1; ``rope_freqs`` holds the
        divisors that the converter computes for llama3.
    """
    attention = get_field(file, f"{arch}.rope.scaling.attn_factor", float, 1.0)
    if attention != 1.0:
        raise FormatError(
            file.path,
            f"{arch}.rope.scaling.attn_factor",
            f"{attention} is not supported: it rescales attention",
        )
    factor = _linear_factor(file, arch)
    if _FACTORS in file.tensors:
        return RopeScaling(kind="factors", factor=factor, factors=_read_factors(file, head_dim))
    return None if factor == 1.0 else RopeScaling(kind="linear", factor=factor)


def _linear_factor(file: GgufFile, arch: str) -> float:
    key = f"{arch}.rope.scaling.type"
    kind = get_field(file, key, str, "linear")
    if kind == "none":
        return 1.0
    if kind != "linear":
        reason = _NOT_SUPPORTED.get(kind, "unknown")
        raise FormatError(file.path, key, f"{kind!r} is not supported ({reason}); expected none or linear")
    old, new = f"{arch}.rope.scale_linear", f"{arch}.rope.scaling.factor"
    # 0 stands for no scaling.
    values = {name: get_field(file, name, float, 0.0) or 1.0 for name in (new, old)}
    factor = values[new] if new in file.fields else values[old]
    if old in file.fields and values[old] != factor:
        raise FormatError(file.path, old, f"{values[old]} disagrees with {new} {factor}")
    if not (np.isfinite(factor) and factor > 0):
        raise FormatError(file.path, new if new in file.fields else old, f"{factor} must be positive")
    return factor


def _read_factors(file: GgufFile, head_dim: int) -> tuple[float, ...]:
    shape = file.shapes[_FACTORS]
    if shape != (head_dim // 2,):
        raise FormatError(
            file.path, _FACTORS, f"shape {shape}; expected one factor for each of {head_dim // 2} frequencies"
        )
    factors = unpack(*file.raw(_FACTORS)).astype(np.float64)
    # Divisors are at least 1; smaller values are frequencies, which other programs keep under this name.
    if not np.isfinite(factors).all() or (factors < 1 - 1e-6).any():
        raise FormatError(file.path, _FACTORS, "holds values below 1 or not finite: these are no divisors")
    return tuple(factors.tolist())
