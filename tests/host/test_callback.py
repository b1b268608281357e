"""Every form of the host callback against the NumPy reference in float64, for records of each format."""

from collections.abc import Callable

import gguf
import jax
import numpy as np
import pytest

from kairox_jax.config import HOST_CALLBACKS
from kairox_jax.host import Rule, ffi_handler
from kairox_jax.host import reference as reference_kernels
from kairox_jax.host.callback import HostNeurons, host_ffn
from kairox_jax.placement import NeuronStore
from kairox_jax.quant import PackedRows, RecordLayout, SharedScales, split_columns

L, F, D, K = 2, 96, 64, 80
IN_A_JIT = [name for name in HOST_CALLBACKS if name != "split"]


def neurons_of(rng: np.random.Generator, *, gated: bool = True, biased: bool = False) -> HostNeurons:
    rows = 3 if gated else 2
    layout = RecordLayout(num_elems=D, formats=("f32",) * rows)
    layers = []
    for _ in range(L):
        records = np.zeros((F, layout.record_bytes), np.uint8)
        weights = rng.normal(size=(F, rows * D)).astype(np.float32) * D**-0.5
        records[:, : 4 * rows * D] = weights.view(np.uint8)
        layers.append(records)
    biases = tuple(rng.normal(size=(F, rows - 1)).astype(np.float32) for _ in range(L)) if biased else None
    store = NeuronStore(layouts=(layout,) * L, layers=tuple(layers), scales=(None,) * L, biases=biases)
    rule = Rule.FATRELU if gated else Rule.RELU
    return HostNeurons(store=store, rule=rule, thresholds=np.array([0.25, 0.75], np.float32)[:L])


def packed_neurons(rng: np.random.Generator, *names: str) -> HostNeurons:
    """Return neurons in the formats of a GGUF file, a layer for each name, with shared-scale down columns."""
    layouts, layers, tables = [], [], []
    for name in names:
        kind = gguf.GGMLQuantizationType[name.upper()]

        def rows(*shape: int, kind: gguf.GGMLQuantizationType = kind, name: str = name) -> PackedRows:
            values = rng.normal(size=shape).astype(np.float32) * D**-0.5
            return PackedRows(data=gguf.quants.quantize(values, kind), format=name)

        layout = RecordLayout(num_elems=D, formats=(name, name, f"{name}_column"))
        records = np.zeros((F, layout.record_bytes), np.uint8)
        layout.put(records, 0, rows(F, D))
        layout.put(records, 1, rows(F, D))
        codes, table = split_columns(rows(D, F))
        layout.put_bytes(records, 2, codes)
        layouts.append(layout)
        layers.append(records)
        tables.append(SharedScales(*table))
    store = NeuronStore(layouts=tuple(layouts), layers=tuple(layers), scales=tuple(tables))
    thresholds = np.array([0.25, 0.5], np.float32)[: len(names)]
    return HostNeurons(store=store, rule=Rule.FATRELU, thresholds=thresholds)


def expected(neurons: HostNeurons, x: np.ndarray, ids: np.ndarray, n: int, layer: int) -> tuple:
    y, active = np.zeros(x.shape), np.zeros((len(x), len(ids)), np.uint8)
    biases = None if neurons.store.biases is None else neurons.store.biases[layer]
    reference_kernels.residual_ffn(
        x, neurons.store.layers[layer], biases, ids, n, neurons.rule, float(neurons.thresholds[layer]), y,
        active, layout=neurons.store.layouts[layer], scales=neurons.store.scales[layer],
    )  # fmt: skip
    return y, active


KINDS: dict[str, Callable[[np.random.Generator], HostNeurons]] = {
    "gated": neurons_of,
    "biased": lambda rng: neurons_of(rng, gated=False, biased=True),
    "packed": lambda rng: packed_neurons(rng, "q8_0", "q4_1"),  # layers of different formats
}


@pytest.mark.parametrize("backend", HOST_CALLBACKS)
@pytest.mark.parametrize("kind", ["gated", "biased", pytest.param("packed", marks=pytest.mark.slow)])
def test_every_backend_equals_float64(backend: str, kind: str, rng: np.random.Generator):
    neurons = KINDS[kind](rng)
    call = host_ffn(neurons, backend)
    run = call if backend == "split" else jax.jit(call)
    ids = rng.permutation(F)[:K].astype(np.int32)
    for batch, n, layer in ((1, 50, 0), (1, K, 1), (1, 0, 1), (3, 33, 1)):
        x = rng.normal(size=(batch, D)).astype(np.float32)
        y, active = (np.asarray(part) for part in run(x, ids, np.int32(n), np.int32(layer)))
        want, fired = expected(neurons, x, ids, n, layer)
        np.testing.assert_array_equal(active, fired)
        assert fired[:, :n].any() == (n > 0) and not fired[:, n:].any()
        assert np.linalg.norm(y - want) <= 1e-6 * max(np.linalg.norm(want), 1e-9)


@pytest.mark.parametrize("backend", IN_A_JIT)
def test_two_layers_in_one_program(backend: str, rng: np.random.Generator):
    neurons = neurons_of(rng)
    call = host_ffn(neurons, backend)
    ids, n = np.arange(F, dtype=np.int32), np.int32(F)
    x = rng.normal(size=(1, D)).astype(np.float32)
    got = jax.jit(lambda x: call(call(x, ids, n, np.int32(0))[0] + x, ids, n, np.int32(1))[0])(x)
    first, _ = expected(neurons, x, ids, F, 0)
    want, _ = expected(neurons, (first + x).astype(np.float32), ids, F, 1)
    assert np.linalg.norm(got - want) <= 2e-6 * np.linalg.norm(want)


@pytest.mark.parametrize("kind", ["gated", "packed"])
def test_the_handler_adds_in_the_same_order_as_the_kernels(kind: str, rng: np.random.Generator):
    neurons = KINDS[kind](rng)
    ids, n, layer = np.arange(F, dtype=np.int32), np.int32(F), np.int32(0)
    x = rng.normal(size=(1, D)).astype(np.float32)
    split, _ = host_ffn(neurons, "split")(x, ids, n, layer)
    ffi, _ = jax.jit(host_ffn(neurons, "ffi"))(x, ids, n, layer)
    np.testing.assert_array_equal(np.asarray(ffi), split)


def test_mistakes_are_named(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch):
    neurons = neurons_of(rng)
    with pytest.raises(ValueError, match="'gpu' is unknown: use one of split, pure, buffer, ffi"):
        host_ffn(neurons, "gpu")
    with pytest.raises(ValueError, match="'ffi' reads host memory .* not on gpu: use 'split' or 'pure'"):
        host_ffn(neurons, "ffi", platform="gpu")
    monkeypatch.setattr(ffi_handler, "KNOWN_MINORS", (1, 2))
    with pytest.raises(ValueError, match="knows XLA's FFI 0.1 to 0.2, not 0."):
        ffi_handler.ffi_minor_version()
