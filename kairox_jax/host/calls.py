"""What the calls of the compiled kernels share: limits, checks of their arguments, and scratch."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from kairox_jax.config import HOST_ACTIVATIONS
from kairox_jax.host import crew
from kairox_jax.host.tiles import TOKENS
from kairox_jax.placement.arena import aligned_bytes
from kairox_jax.quant.columns import BLOCK

MAX_BATCH = 8
# Less than this is read by the caller alone: waking sleeping workers takes as long.
SERIAL_BYTES = 1 << 18
COUNTERS = np.zeros(8 * crew.STAGE_BYTES // 8, np.int64)  # of the owner, as its scratch; of 7 stages at most

# Neurons whose sum one thread makes. Beginning a sum and adding it to the others takes as long as a few neurons: few
# sums are faster, several are needed to share them out. A chunk holds a block at least, and so many neurons that there
# are FEW_CHUNKS of them, or if it would be larger than LARGE_CHUNK, MAX_CHUNKS.
FEW_CHUNKS, LARGE_CHUNK, MAX_CHUNKS = 12, 128, 32

_FLOAT32 = np.dtype(np.float32)
_scratch: dict[str, np.ndarray] = {}


def aligned_zeros(*shape: int) -> np.ndarray:
    """Return float32 zeros whose first byte begins a cache line: vectors that cross one are read in two steps."""
    return aligned_bytes(1, 4 * math.prod(shape), zeroed=True).view(np.float32).reshape(shape)


def aligned(name: str, *shape: int) -> np.ndarray:
    """Return the owner's float32 scratch of that name, kept: fresh pages would cost more than the sums."""
    size = math.prod(shape)
    if name not in _scratch or _scratch[name].size < size:
        _scratch[name] = aligned_zeros(size)
    return _scratch[name][:size].reshape(shape)


def check_floats(
    name: str, array: np.ndarray, shape: tuple[int | None, ...], *, written: bool = False
) -> None:
    """Raise ``ValueError`` unless the array is C-contiguous float32 of this shape, where None is any length.

    Args:
        written: whether it must be writable too.
    """
    flags = array.flags
    if array.dtype == _FLOAT32 and flags.c_contiguous and array.ndim == len(shape):
        if written and not flags.writeable:
            raise ValueError(f"{name} cannot be written: give an array that is not read-only")
        for want, got in zip(shape, array.shape, strict=True):
            if want is not None and want != got:
                break
        else:
            return
    raise ValueError(
        f"{name} is {array.dtype} {array.shape}: expected C-contiguous float32 "
        f"{tuple('any' if n is None else n for n in shape)}"
    )


def check_places(
    count: int, cos: np.ndarray, sin: np.ndarray, cache_rows: np.ndarray, positions: np.ndarray
) -> None:
    """Raise ``ValueError`` unless these are the rotations, rows of the cache and positions of ``count`` tokens."""
    for name, turn in (("cos", cos), ("sin", sin)):
        check_floats(name, turn, (count, None))
    for name, numbers in (("cache_rows", cache_rows), ("positions", positions)):
        if numbers.dtype != np.int32 or numbers.shape != (count,):
            raise ValueError(f"{name} are {numbers.dtype} {numbers.shape}: expected int32 ({count},)")


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a view that cannot be written: a kernel is compiled once, whether or not its caller might write there."""
    view = array.view()
    view.flags.writeable = False
    return view


def checked(activations: str) -> str:
    """Return the name of a form of activations, if it is one."""
    if activations not in HOST_ACTIVATIONS:
        raise ValueError(f"activations {activations!r} are not one of {', '.join(HOST_ACTIVATIONS)}")
    return activations


def room_for(count: int, num: int) -> Float[np.ndarray, "groups floats"]:
    """Return the owner's scratch for a prompt's tokens of ``num`` floats in groups, as its loops read them."""
    return aligned("tokens", -(-count // TOKENS), num * TOKENS)


def chunk_of(n: int) -> int:
    """Return how many of n neurons are added up together: whole blocks, so that few share their scales' reads."""
    wanted = max(min(LARGE_CHUNK, n // FEW_CHUNKS), n // MAX_CHUNKS)
    return max(1, -(-wanted // BLOCK)) * BLOCK
