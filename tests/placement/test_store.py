"""The store keeps what the file holds: bit-exact against the gguf library, whatever the down matrix is."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from kairox_jax.placement import NeuronStore, load_store, record_layouts
from kairox_jax.quant import FORMATS, PackedRows

D, F = 64, 96


@dataclass
class File:
    """A checkpoint of one gated layer a format; ``down`` says each layer's, "!" for rows of neurons."""

    down: tuple[str, ...]
    rows: str = "q8_0"
    config: Any = None
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    held: dict[tuple[str, bool], PackedRows] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)
    releases: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(3)
        self.config = SimpleNamespace(
            num_layers=len(self.down), num_neurons=F, d_model=D, gated=True, ffn_bias=False
        )
        for layer, down in enumerate(self.down):
            for name, format in (("w_gate", self.rows), ("w_up", self.rows), ("w_down", down)):
                by_output = name == "w_down" and not down.endswith("!")
                format = format.rstrip("!")
                shape = (D, F) if by_output else (F, D)
                kind = gguf.GGMLQuantizationType[format.upper()]
                if format == "q6_k":
                    self.weights[f"layers.{layer}.{name}"] = rng.normal(size=(F, D)).astype(np.float32)
                    continue
                raw = gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), kind)
                raw = np.ascontiguousarray(raw).view(np.uint8).reshape(shape[0], -1)
                values = gguf.quants.dequantize(raw, kind).reshape(shape)
                self.weights[f"layers.{layer}.{name}"] = values.T if by_output else values
                self.held[f"layers.{layer}.{name}", by_output] = PackedRows(data=raw, format=format)

    def tensor(self, name: str) -> np.ndarray:
        assert not any(held == name for held, _ in self.held), f"{name} was unpacked"
        return self.weights[name].copy()

    def packed(self, name: str, *, transposed: bool = False) -> PackedRows | None:
        return self.held.get((name, transposed))

    def packed_format(self, name: str) -> str | None:
        held = self.packed(name)
        return None if held is None else held.format

    def check_packed(self, name: str) -> None:
        self.checked.append(name)

    def release(self) -> None:
        self.releases += 1


def weights_of(store: NeuronStore, layer: int) -> np.ndarray:
    return store.layouts[layer].unpack(store.layers[layer], store.scales[layer])


@pytest.mark.parametrize("down", [*FORMATS, "q8_0!", "q4_0!", "f16!"])
def test_records_hold_the_files_weights_to_the_bit(down: str) -> None:
    file = File(down=(down,))
    store = load_store(file)
    names = [f"layers.0.{name}" for name in ("w_gate", "w_up", "w_down")]
    np.testing.assert_array_equal(weights_of(store, 0), np.stack([file.weights[n] for n in names], axis=1))
    assert sorted(set(file.checked)) == sorted(names), "every matrix is looked through for NaN"
    assert file.releases == file.config.num_layers, "the file's pages are given back layer by layer"
    kept = sum(rows.data.nbytes for rows in file.held.values())
    padding = F * (store.record_bytes(0) - sum(store.layouts[0].row_bytes))
    assert store.nbytes == kept + padding, "no byte more than the file"
    assert not store.layers[0].flags.writeable and store.layers[0].ctypes.data % 64 == 0
    for table in store.scales[0] or ():
        assert table is None or (not table.flags.writeable and table.ctypes.data % 64 == 0)


def test_each_layer_keeps_its_own_format() -> None:
    file = File(down=("q4_1", "q4_0", "q6_k"), rows="q4_0")
    layouts = record_layouts(file)
    assert [layout.formats for layout in layouts] == [
        ("q4_0", "q4_0", "q4_1_column"),
        ("q4_0", "q4_0", "q4_0_column"),
        ("q4_0", "q4_0", "f32"),  # the kernels do not read K-quants
    ]
    store = load_store(file)
    for layer in range(3):
        np.testing.assert_array_equal(weights_of(store, layer)[:, 2], file.weights[f"layers.{layer}.w_down"])
    assert [table is None for table in store.scales] == [False, False, True]


def test_gathered_records_are_the_neurons(rng: np.random.Generator) -> None:
    store = load_store(File(down=("q8_0",)))
    ids = rng.permutation(F)[:7].astype(np.int32)
    staging = store.gather(0, ids, rows=12)
    assert staging.shape == (12, store.record_bytes(0))
    np.testing.assert_array_equal(staging[:7], store.layers[0][ids])
