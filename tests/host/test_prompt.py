"""The FFN of a prompt's tokens against float64: formats, ragged sizes, rules, biases, threads."""

import gguf
import numpy as np
import pytest
from test_columns import SOURCES, Layer

from kairox_jax.host import LayerFfn, Rule, matmul, matvec, reference, threads
from kairox_jax.quant import PackedRows, RecordLayout

pytestmark = pytest.mark.slow  # many forms to compile
TOLERANCE = 1e-5  # relative


def added(ffn: LayerFfn, h: np.ndarray, x: np.ndarray) -> np.ndarray:
    """What the FFN adds to the residual stream x."""
    out = x.copy()
    ffn.add_all(h, out)
    return out - x


def wanted(h, records, biases, rule, threshold, layout, scales=None) -> np.ndarray:
    ids, out = np.arange(len(records), dtype=np.int32), np.zeros(h.shape)
    active = np.zeros((len(h), len(ids)), np.uint8)
    reference.residual_ffn(
        h, records, biases, ids, len(ids), rule, threshold, out, active, layout=layout, scales=scales
    )
    assert 0.05 < active.mean() < 0.95, "the case must hold both active and inactive neurons"
    return out


def close(got: np.ndarray, want: np.ndarray) -> bool:
    return float(np.linalg.norm(got - want)) <= TOLERANCE * float(np.linalg.norm(want))


@pytest.mark.parametrize("tokens", [1, 31, 33, 70])
@pytest.mark.parametrize(
    ("rows", "rule"), [(3, Rule.SILU), (3, Rule.FATRELU), (3, Rule.DRELU), (2, Rule.RELU)]
)
@pytest.mark.parametrize(("num", "neurons"), [(100, 150), (5, 7), (200, 33)])
def test_equals_float64(rng, tokens: int, rows: int, rule: Rule, num: int, neurons: int) -> None:
    h = rng.normal(size=(tokens, num)).astype(np.float32)
    weights = (rng.normal(size=(neurons, rows, num)) / np.sqrt(num)).astype(np.float32)
    biases = rng.normal(size=(neurons, rows - 1)).astype(np.float32)
    layout = RecordLayout(num_elems=num, formats=("f32",) * rows, alignment=1)
    records = weights.reshape(neurons, -1).view(np.uint8)
    ffn = LayerFfn(records, biases, rule, 0.2, num=num, layout=layout)
    want = wanted(h, records, biases, rule, 0.2, layout)
    assert close(added(ffn, h, np.zeros_like(h)), want)
    x = rng.normal(size=h.shape).astype(np.float32)
    np.testing.assert_allclose(added(ffn, h, x), want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("num", [33, 576])
def test_formats_of_files(name: str, num: int, rng: np.random.Generator) -> None:
    layer, h = Layer(rng, name, num), rng.normal(size=(40, num)).astype(np.float32)
    for activations in ("float32", "int8"):  # of the steps: a prompt's are not rounded
        ffn = LayerFfn(
            layer.records, None, Rule.RELU, 0.0, num=num, layout=layer.layout, scales=layer.scales,
            activations=activations,
        )  # fmt: skip
        want = wanted(h, layer.records, None, Rule.RELU, 0.0, layer.layout, layer.scales)
        assert close(added(ffn, h, np.zeros_like(h)), want)


@pytest.mark.parametrize("tokens", [1, 32, 41])
@pytest.mark.parametrize(("name", "rows", "num"), [("f32", 70, 100), ("q8_0", 5, 576), ("q4_1", 33, 64)])
def test_products_with_a_matrix(rng, tokens: int, name: str, rows: int, num: int) -> None:
    kind = gguf.GGMLQuantizationType[name.upper()]
    data = gguf.quants.quantize(rng.normal(size=(rows, num)).astype(np.float32), kind)
    weights = gguf.quants.dequantize(data, kind).astype(np.float64).reshape(rows, num)
    matrix = PackedRows(data=np.ascontiguousarray(data).view(np.uint8).reshape(rows, -1), format=name)
    x, out = rng.normal(size=(tokens, num)).astype(np.float32), np.full((tokens, rows), np.nan, np.float32)
    matmul(x, matrix, out)
    assert close(out, x @ weights.T)
    if name == "f32":
        again = np.empty_like(out)
        matmul(x, weights.astype(np.float32), again)
        np.testing.assert_array_equal(again, out)
    with pytest.raises(ValueError, match="out is float32"):
        matmul(x, matrix, out[:, 1:].copy())
    with pytest.raises(ValueError, match="as x needs"):
        matmul(np.zeros((2, num + 32), np.float32), matrix, out)


def test_same_bits_for_any_number_of_threads(rng: np.random.Generator) -> None:
    layer, h = Layer(rng, "q4_0", 576), rng.normal(size=(50, 576)).astype(np.float32)
    ffn = LayerFfn(layer.records, None, Rule.SILU, 0.1, num=576, layout=layer.layout, scales=layer.scales)
    before, outs = threads.thread_count(), []
    for n in range(before):
        threads.limit_threads(n + 1)
        outs.append(added(ffn, h, np.zeros_like(h)))
    assert threads.thread_count() == before
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


def test_a_token_does_not_depend_on_its_neighbours(rng: np.random.Generator) -> None:
    layer, h = Layer(rng, "q8_0", 576), rng.normal(size=(45, 576)).astype(np.float32)
    ffn = LayerFfn(layer.records, None, Rule.RELU, 0, num=576, layout=layer.layout, scales=layer.scales)
    together = added(ffn, h, np.zeros_like(h))
    for token in (0, 31, 44):
        alone = added(ffn, h[token : token + 1].copy(), np.zeros((1, 576), np.float32))
        np.testing.assert_array_equal(alone[0], together[token])


def test_nan_reaches_its_token_alone(rng: np.random.Generator) -> None:
    layer, h = Layer(rng, "q4_1", 64), rng.normal(size=(3, 64)).astype(np.float32)
    h[1, 5] = np.nan
    ffn = LayerFfn(layer.records, None, Rule.RELU, 0, num=64, layout=layer.layout, scales=layer.scales)
    bad = np.isnan(added(ffn, h, np.zeros_like(h)))
    assert bad[1].all() and not bad[[0, 2]].any()


def test_mistakes_are_named(rng: np.random.Generator) -> None:
    layer, h = Layer(rng, "q4_1", 64), np.zeros((3, 64), np.float32)
    ffn = LayerFfn(layer.records, None, Rule.RELU, 0, num=64, layout=layer.layout, scales=layer.scales)
    with pytest.raises(ValueError, match="h is float32"):
        ffn.add_all(h[:, :32].copy(), h)
    with pytest.raises(ValueError, match="x is float64"):
        ffn.add_all(h, h.astype(np.float64))
    with pytest.raises(ValueError, match=r"expected C-contiguous float32 \(3, 64\)"):
        ffn.add_all(h, np.zeros((4, 64), np.float32))


def test_what_cannot_be_written_is_refused() -> None:
    ones = np.ones((2, 64), np.float32)
    frozen = np.zeros((2, 64), np.float32)
    frozen.flags.writeable = False
    records, ids = np.ones((40, 2, 64), np.float32), np.arange(40, dtype=np.int32)
    ffn = LayerFfn(records, None, Rule.RELU, 0.0, num=64)
    closed = np.zeros((2, 40), np.uint8)
    closed.flags.writeable = False
    with pytest.raises(ValueError, match="out cannot be written"):
        ffn(ones, ids, 40, frozen, np.zeros((2, 40), np.uint8))
    with pytest.raises(ValueError, match="active cannot be written"):
        ffn(ones, ids, 40, np.zeros((2, 64), np.float32), closed)
    with pytest.raises(ValueError, match="x cannot be written"):
        ffn.add_all(ones, frozen)
    for product in (matmul, matvec):
        with pytest.raises(ValueError, match="out cannot be written"):
            product(ones, np.ones((64, 64), np.float32), frozen)
    assert not frozen.any() and not closed.any()
