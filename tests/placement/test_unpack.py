"""Unpacking on the device against the host."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kairox_jax.placement import unpack_records, unpack_rows
from kairox_jax.quant import FORMATS, PackedRows, RecordLayout, dequantize


def packed(rng: np.random.Generator, rows: int, name: str) -> PackedRows:
    weights = rng.normal(size=(rows, 96)).astype(np.float32)
    raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name.upper()])
    return PackedRows(data=np.ascontiguousarray(raw).view(np.uint8).reshape(rows, -1), format=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_rows_unpack_as_on_the_host(rng: np.random.Generator, name: str) -> None:
    raw = packed(rng, 7, name).data
    got = np.asarray(jax.jit(lambda r: unpack_rows(r, name))(jnp.asarray(raw)))
    want = dequantize(raw, name)
    if name == "q4_1":  # XLA may fuse the multiplication and the addition
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    else:
        np.testing.assert_array_equal(got, want)


def test_records_unpack_row_by_row(rng: np.random.Generator) -> None:
    layout = RecordLayout(num_elems=96, formats=("q4_1", "q4_1", "f32"))
    records = np.zeros((5, layout.record_bytes), np.uint8)
    for row, name in enumerate(layout.formats):
        layout.put(records, row, packed(rng, 5, name))
    got = np.stack(jax.jit(lambda r: unpack_records(r, layout))(jnp.asarray(records)), axis=1)
    np.testing.assert_allclose(got, layout.unpack(records), rtol=1e-6, atol=1e-7)
    assert layout.record_bytes % 64 == 0


def test_layout_refuses_what_does_not_fit(rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="one format"):
        RecordLayout(num_elems=96, formats=("q4_1", "q8_0", "f32"))
    with pytest.raises(ValueError, match="1 rows"):
        RecordLayout(num_elems=96, formats=("f32",))
    layout = RecordLayout(num_elems=96, formats=("f32", "f32"))
    with pytest.raises(ValueError, match="needs f32, not f16"):
        layout.put(np.zeros((5, layout.record_bytes), np.uint8), 0, packed(rng, 5, "f16"))
