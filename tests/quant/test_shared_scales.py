"""Shared-scale columns against the gguf library: the file's weights, bit for bit."""

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kairox_jax.quant import (
    COLUMN_FORMATS,
    FORMATS,
    PackedRows,
    RecordLayout,
    SharedScales,
    column_format,
    scales_bytes,
    split_columns,
    transpose_rows,
    unpack_columns,
)

SOURCES = [fmt.source for fmt in COLUMN_FORMATS.values()]


def random_blocks(rng: np.random.Generator, rows: int, num: int, name: str) -> PackedRows:
    """Rows with every code, and finite scales of both signs, subnormal ones among them."""
    fmt = FORMATS[name]
    data = rng.integers(0, 256, (rows, fmt.row_bytes(num)), np.uint8)
    heads = data.reshape(rows, -1, fmt.block_bytes)[..., : 4 if name == "q4_1" else 2]
    heads[..., 1::2] &= 0xBB  # no exponent of infinity
    return PackedRows(data=data, format=name)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(SOURCES),
    num=st.integers(1, 100),
    blocks=st.integers(1, 11),
    seed=st.integers(0, 2**32 - 1),
)
def test_columns_are_the_files_weights_to_the_bit(name: str, num: int, blocks: int, seed: int) -> None:
    rows = random_blocks(np.random.default_rng(seed), num, 32 * blocks, name)
    codes, scales = split_columns(rows)
    column = column_format(name)
    assert column is not None
    assert codes.shape == (32 * blocks, COLUMN_FORMATS[column].column_bytes(num))
    assert scales.nbytes == scales_bytes(column, num, 32 * blocks)
    want = gguf.quants.dequantize(rows.data, gguf.GGMLQuantizationType[name.upper()])
    neurons = np.random.default_rng(seed).permutation(32 * blocks)
    got = unpack_columns(codes[neurons], column, scales, neurons, num)
    np.testing.assert_array_equal(got, want.T[neurons])


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_single_weights_are_turned_in_their_own_type(name: str, rng: np.random.Generator) -> None:
    size = FORMATS[name].block_bytes
    data = rng.integers(0, 256, (130, 70 * size), np.uint8)
    out = np.zeros((70, 130 * size), np.uint8)
    transpose_rows(PackedRows(data=data, format=name), out)
    np.testing.assert_array_equal(out.reshape(70, 130, size), data.reshape(130, 70, size).swapaxes(0, 1))


def test_a_record_with_shared_scales_needs_its_table(rng: np.random.Generator) -> None:
    layout = RecordLayout(num_elems=33, formats=("f16", "f16", "q4_0_column"))
    assert layout.shares_scales and layout.row_bytes == (66, 66, 32)
    codes, scales = split_columns(random_blocks(rng, 33, 64, "q4_0"))
    records = np.zeros((64, layout.record_bytes), np.uint8)
    layout.put_bytes(records, 2, codes)
    with pytest.raises(ValueError, match="need the layout's scales|need the layer's scales"):
        layout.unpack(records)
    some = np.array([40, 3])
    np.testing.assert_array_equal(
        layout.unpack(records[some], scales, some), layout.unpack(records, scales)[some]
    )
    wrong = SharedScales(scales.scales * 2, None)
    assert not np.array_equal(layout.unpack(records, wrong), layout.unpack(records, scales))


def test_mistakes_are_named() -> None:
    rows = PackedRows(data=np.zeros((2, 8), np.uint8), format="f32")
    with pytest.raises(ValueError, match="f32 rows have no blocks"):
        split_columns(rows)
    blocks = PackedRows(data=np.zeros((2, 34), np.uint8), format="q8_0")
    with pytest.raises(ValueError, match="q8_0 rows are blocks"):
        transpose_rows(blocks, np.zeros((32, 2), np.uint8))
    with pytest.raises(ValueError, match="down|one of"):
        RecordLayout(num_elems=32, formats=("q8_0_column", "q8_0_column", "q8_0"))
    assert column_format("f16") is None and scales_bytes("f16", 64, 64) == 0
