"""Records with shared-scale down columns through the host kernels, against float64 of the gguf library's weights."""

import gguf
import numpy as np
import pytest

from kairox_jax.host import MAX_BATCH, Rule, matvec, reference, residual_ffn, threads
from kairox_jax.quant import COLUMN_FORMATS, PackedRows, RecordLayout, SharedScales, split_columns

pytestmark = pytest.mark.slow  # many forms to compile
F = 160
TOLERANCE = 1e-6  # relative to the length of the sums of absolute products, which rounding is measured by
SOURCES = [fmt.source for fmt in COLUMN_FORMATS.values()]


def quantised(rng: np.random.Generator, rows: int, num: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    kind = gguf.GGMLQuantizationType[name.upper()]
    raw = gguf.quants.quantize(rng.normal(size=(rows, num)).astype(np.float32) / np.sqrt(num), kind)
    raw = np.ascontiguousarray(raw).view(np.uint8).reshape(rows, -1)
    return raw, gguf.quants.dequantize(raw, kind).astype(np.float64).reshape(rows, num)


class Layer:
    """Records of one layer and, independently, their weights in float64."""

    def __init__(self, rng: np.random.Generator, name: str, num: int) -> None:
        row = "f16" if num % 32 else name
        self.layout = RecordLayout(num_elems=num, formats=(row, row, f"{name}_column"))
        self.records = np.zeros((F, self.layout.record_bytes), np.uint8)
        inputs = [quantised(rng, F, num, row) for _ in range(2)]
        for at, (raw, _) in enumerate(inputs):
            self.layout.put(self.records, at, PackedRows(data=raw, format=row))
        raw, down = quantised(rng, num, F, name)
        codes, self.scales = split_columns(PackedRows(data=raw, format=name))
        self.layout.put_bytes(self.records, 2, codes)
        self.gate, self.up, self.down = inputs[0][1], inputs[1][1], down.T

    def run(self, x: np.ndarray, ids: np.ndarray, **changes) -> tuple[np.ndarray, np.ndarray]:
        out = np.full(x.shape, np.nan, np.float32)
        active = np.full((len(x), len(ids)), 7, np.uint8)
        arguments = {"layout": self.layout, "scales": self.scales, **changes}
        residual_ffn(x, self.records, None, ids, len(ids), Rule.RELU, 0.0, out, active, **arguments)
        return out, active

    def want(self, x: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the sum in float64, who is active, and the sum of absolute values."""
        gate, up, wide = self.gate[ids], self.up[ids], x.astype(np.float64)
        z = np.maximum(wide @ gate.T, 0) * (wide @ up.T)
        most = (np.abs(wide) @ np.abs(gate).T) * (np.abs(wide) @ np.abs(up).T) * (z != 0)
        return z @ self.down[ids], z != 0, most @ np.abs(self.down[ids])


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("num", [1, 33, 100, 576])
def test_sums_are_those_of_the_files_weights(name: str, num: int, rng: np.random.Generator) -> None:
    layer = Layer(rng, name, num)
    for batch in (1, 3, MAX_BATCH) if num == 576 else (1, MAX_BATCH):  # a form to compile for each
        x = rng.normal(size=(batch, num)).astype(np.float32)
        for ids in (np.arange(F), rng.permutation(F)[:77], np.array([5]), np.empty(0, int)):
            ids = ids.astype(np.int32)
            out, active = layer.run(x, ids)
            want, fires, most = layer.want(x, ids)
            np.testing.assert_array_equal(active, fires)
            assert np.linalg.norm(out - want) <= TOLERANCE * np.linalg.norm(most)
            again = np.zeros_like(want)
            reference.residual_ffn(
                x, layer.records, None, ids, len(ids), Rule.RELU, 0.0, again, active,
                layout=layer.layout, scales=layer.scales,
            )  # fmt: skip
            np.testing.assert_allclose(again, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1"])
def test_row_products_are_those_of_the_files_weights(name: str, rng: np.random.Generator) -> None:
    raw, weights = quantised(rng, 50, 576, name)
    for batch in (1, 2):
        x, out = rng.normal(size=(batch, 576)).astype(np.float32), np.zeros((batch, 50), np.float32)
        matvec(x, PackedRows(data=raw, format=name), out)
        want = x.astype(np.float64) @ weights.T
        assert np.linalg.norm(out - want) <= TOLERANCE * np.linalg.norm(want)


def test_same_bits_for_any_number_of_threads(rng: np.random.Generator) -> None:
    layer, ids = Layer(rng, "q4_1", 576), np.arange(F, dtype=np.int32)
    x = rng.normal(size=(1, 576)).astype(np.float32)
    outs = [layer.run(x, ids, num_threads=n + 1)[0] for n in range(threads.thread_count())]
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


def test_nan_reaches_the_output(rng: np.random.Generator) -> None:
    layer, x = Layer(rng, "q8_0", 64), rng.normal(size=(1, 64)).astype(np.float32)
    x[0, 3] = np.nan
    assert np.isnan(layer.run(x, np.arange(F, dtype=np.int32))[0]).all()


def test_mistakes_are_named(rng: np.random.Generator) -> None:
    layer, x, ids = Layer(rng, "q4_1", 64), np.zeros((1, 64), np.float32), np.arange(3, dtype=np.int32)
    tables = layer.scales
    with pytest.raises(ValueError, match="q4_1_column down columns without a table"):
        layer.run(x, ids, scales=None)
    with pytest.raises(ValueError, match="q4_1_column scales are None"):
        layer.run(x, ids, scales=SharedScales(tables.scales, None))
    with pytest.raises(ValueError, match=r"expected contiguous float16 \(5, 64\)"):
        layer.run(x, ids, scales=SharedScales(tables.scales[1:], tables.minima))
    plain = RecordLayout(num_elems=64, formats=("q4_1", "q4_1", "q4_1"))
    with pytest.raises(ValueError, match="with a table of scales"):
        residual_ffn(
            x, np.zeros((F, plain.record_bytes), np.uint8), None, ids, 3, Rule.RELU, 0.0, np.zeros_like(x),
            np.zeros((1, 3), np.uint8), layout=plain, scales=tables,
        )  # fmt: skip
