"""Splitting of GGUF rows against the gguf package."""

import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest

from pallas_kernels.block_rows import FORMATS, empty_rows, row_format, split_blocks, take_rows


@pytest.mark.parametrize("fmt", FORMATS)
def test_split_rows_hold_the_weights_of_the_file(fmt: str, rng: np.random.Generator):
    raw, weights = oracle.quantised(rng.normal(size=(5, 96)).astype(np.float32), fmt)
    rows = split_blocks(jnp.asarray(raw), fmt)
    assert rows.shape == (5, 96) and row_format(rows) == fmt
    assert np.array_equal(take_rows(rows, None), weights)
    assert np.array_equal(take_rows(rows, jnp.array([3, 0])), weights[[3, 0]])


@pytest.mark.parametrize("fmt", FORMATS)
def test_empty_rows_are_finite_and_fit_split_rows(fmt: str, rng: np.random.Generator):
    raw, _ = oracle.quantised(rng.normal(size=(5, 96)).astype(np.float32), fmt)
    rows, empty = split_blocks(jnp.asarray(raw), fmt), empty_rows(5, 96, fmt)
    for leaf, other in zip(jax.tree.leaves(rows), jax.tree.leaves(empty), strict=True):
        assert leaf.shape == other.shape and leaf.dtype == other.dtype
    assert not np.any(take_rows(empty, None))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="35 bytes are no whole q8_0 blocks of 34 bytes"):
        split_blocks(jnp.zeros((1, 35), jnp.uint8), "q8_0")
    with pytest.raises(ValueError, match="format 'q5_1' has no device form"):
        split_blocks(jnp.zeros((1, 24), jnp.uint8), "q5_1")
    with pytest.raises(ValueError, match="whole blocks of 32 weights, not 40"):
        empty_rows(2, 40, "q4_0")
