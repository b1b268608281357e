"""Unpacking against the reference implementation of the gguf library."""

import gguf
import numpy as np
import pytest

from kairox_jax.quant import FORMATS, PackedRows, dequantize

GGUF_TYPES = {name: gguf.GGMLQuantizationType[name.upper()] for name in FORMATS}


@pytest.mark.parametrize("name", FORMATS)
def test_unpacks_as_the_gguf_library(name: str, rng: np.random.Generator) -> None:
    weights = rng.normal(size=(3, 7, 96)).astype(np.float32)
    raw = gguf.quants.quantize(weights, GGUF_TYPES[name])
    raw = np.ascontiguousarray(raw).view(np.uint8).reshape(3, 7, -1)
    want = gguf.quants.dequantize(raw.reshape(21, -1), GGUF_TYPES[name]).reshape(3, 7, 96)
    got = dequantize(raw, name)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(got, weights, atol={"q4_0": 0.4, "q4_1": 0.2, "q8_0": 0.02}.get(name, 0.02))


@pytest.mark.parametrize("name", FORMATS)
def test_row_sizes(name: str) -> None:
    fmt = FORMATS[name]
    assert fmt.row_elems(fmt.row_bytes(96)) == 96
    assert PackedRows(data=np.zeros((5, fmt.row_bytes(96)), np.uint8), format=name).shape == (5, 96)


def test_refuses_broken_rows() -> None:
    with pytest.raises(ValueError, match="multiple of 32 weights, not 33"):
        FORMATS["q4_0"].row_bytes(33)
    with pytest.raises(ValueError, match="no whole q8_0 blocks"):
        dequantize(np.zeros((2, 35), np.uint8), "q8_0")
    with pytest.raises(ValueError, match="'q3' is not one of"):
        dequantize(np.zeros((2, 35), np.uint8), "q3")
