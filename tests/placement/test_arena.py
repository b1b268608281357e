"""Arrays of one allocation: aligned, apart from each other, and read-only copies."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kairox_jax.placement import Arena
from kairox_jax.placement.arena import ALIGNMENT, BLOCK_BYTES, LARGE_PAGE


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 300)), max_size=30))
def test_arrays_are_aligned_and_apart(shapes: list[tuple[int, int]]) -> None:
    arena = Arena()
    arrays = [arena.take(rows, row_bytes) for rows, row_bytes in shapes]
    for number, array in enumerate(arrays):
        array[:] = number
    for number, (array, shape) in enumerate(zip(arrays, shapes, strict=True)):
        assert array.shape == shape and array.dtype == np.uint8 and array.flags.c_contiguous
        assert not array.size or array.ctypes.data % ALIGNMENT == 0
        assert (array == number).all()


def test_small_arrays_share_an_allocation_and_large_ones_have_their_own() -> None:
    arena = Arena()
    first, second = arena.take(3, 100), arena.take(1, 64)
    assert first.ctypes.data % LARGE_PAGE == 0
    assert second.ctypes.data - first.ctypes.data == 320
    large = arena.take(1, BLOCK_BYTES + 1)
    assert large.nbytes == BLOCK_BYTES + 1 and large.ctypes.data % LARGE_PAGE == 0


def test_arrays_may_have_allocations_of_their_own() -> None:
    arena = Arena(0)
    arrays = [arena.take(3, 100), arena.take(1, 64), arena.take(2, 5)]
    assert all(array.base is not None and array.ctypes.data % LARGE_PAGE == 0 for array in arrays)
    assert len({array.ctypes.data for array in arrays}) == 3


def test_a_copy_keeps_its_values_and_cannot_be_written(rng: np.random.Generator) -> None:
    arena = Arena()
    values = rng.normal(size=(5, 7)).astype(np.float16)
    copies = [arena.keep(values), arena.keep(values[::2]), arena.keep(np.empty((0, 0), np.uint8))]
    values = values.copy()
    for copy, want in zip(copies, (values, values[::2], np.empty((0, 0), np.uint8)), strict=True):
        np.testing.assert_array_equal(copy, want)
        assert copy.dtype == want.dtype and not copy.flags.writeable
