"""Records as matrices, against the gguf library's and NumPy's weights."""

import numpy as np
import pytest
from test_columns import SOURCES, F, Layer

from kairox_jax.host import unpack_neurons
from kairox_jax.quant import PackedRows, RecordLayout


def empty(layer: Layer, count: int) -> list[np.ndarray]:
    return [np.full((count, layer.layout.num_elems), np.nan, np.float32) for _ in range(3)]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("num", [1, 33, 96])
def test_matrices_are_the_files_weights(name: str, num: int, rng: np.random.Generator) -> None:
    layer = Layer(rng, name, num)
    for first, count in ((0, F), (64, 32), (128, 7)):
        out = empty(layer, count)
        unpack_neurons(layer.records, layer.layout, layer.scales, first, out)
        for got, want in zip(out, (layer.gate, layer.up, layer.down), strict=True):
            np.testing.assert_allclose(got, want[first : first + count], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_numbers_are_taken_as_they_are(name: str, rng: np.random.Generator) -> None:
    """Sixteen bits are the upper half of a float32."""
    weights = rng.normal(size=(2, 9, 40)).astype(np.float32).view(np.uint32) & 0xFFFF0000
    layout = RecordLayout(num_elems=40, formats=(name, name))
    records = np.zeros((9, layout.record_bytes), np.uint8)
    for at, matrix in enumerate(weights):
        bits = matrix if name == "f32" else (matrix >> 16).astype(np.uint16)
        layout.put(records, at, PackedRows(data=bits.view(np.uint8), format=name))
    out = [np.empty((9, 40), np.float32) for _ in range(2)]
    unpack_neurons(records, layout, None, 0, out)
    np.testing.assert_array_equal(out, weights.view(np.float32))


def test_what_does_not_fit_is_refused(rng: np.random.Generator) -> None:
    layer = Layer(rng, "q8_0", 33)
    with pytest.raises(ValueError, match="do not fit 160 records"):
        unpack_neurons(layer.records, layer.layout, layer.scales, 128, empty(layer, 64))
    with pytest.raises(ValueError, match="contiguous float32"):
        unpack_neurons(layer.records, layer.layout, layer.scales, 0, [np.empty((4, 32), np.float32)] * 3)
    for scales, first in ((None, 0), (layer.scales, 5)):
        with pytest.raises(ValueError, match="table of scales"):
            unpack_neurons(layer.records, layer.layout, scales, first, empty(layer, 8))
