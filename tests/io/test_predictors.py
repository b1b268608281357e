"""Predictor files: what is written comes back, forecasts match NumPy, and nothing wrong is accepted."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from safetensors import safe_open

from kairox_jax.config import ModelConfig
from kairox_jax.io.own_predictors import checkpoint_predictors
from kairox_jax.io.predictor_file import pack_rows, read_meta
from kairox_jax.io.predictors import (
    LayerPredictor,
    Predictors,
    check_predictors,
    load_predictors,
    save_predictors,
    shipped_predictors,
)
from kairox_jax.io.sparsity import fingerprint

L, D, F, R = 2, 32, 48, 64


class Source:
    """A model of two layers; only norms matter for the fingerprint."""

    def __init__(self, seed: int = 0, **changes: object) -> None:
        self.config = ModelConfig(
            family="llama",
            num_layers=L,
            d_model=D,
            num_neurons=F,
            num_heads=2,
            num_kv_heads=1,
            head_dim=2,
            vocab_size=7,
            context_length=16,
            activation="silu",
        )
        self.config = dataclasses.replace(self.config, **changes)  # type: ignore[arg-type]
        self.seed = seed
        self.extra: dict[str, np.ndarray] = {}

    def tensor(self, name: str) -> np.ndarray:
        if name in self.extra:
            return self.extra[name].copy()
        return np.random.default_rng([self.seed, *name.encode()]).normal(size=4).astype(np.float32)

    def has(self, name: str) -> bool:
        return name in self.extra

    def packed(self, name: str) -> None:
        return None


def make(
    rng: np.random.Generator, source: Source, formats: tuple[str, str] = ("q8_0", "q4_0"), rest: bool = False
) -> Predictors:
    layers = []
    for layer in range(L):
        fc1, fc2 = rng.normal(size=(R, D)), rng.normal(size=(F, R))
        biases = {"fc1_bias": rng.normal(size=R), "bias": rng.normal(size=F)} if layer else {}
        layers.append(
            LayerPredictor(
                fc1=pack_rows(fc1, formats[0]),
                fc2=pack_rows(fc2, formats[1]),
                threshold=0.25 * layer - 0.1,
                rest=pack_rows(rng.normal(size=(D, R)), formats[1]) if rest else None,
                rest_bias=rng.normal(size=D).astype(np.float16).astype(np.float32) if rest else None,
                **{name: b.astype(np.float16).astype(np.float32) for name, b in biases.items()},
            )
        )
    meta = {"model": "tiny", "fingerprint": fingerprint(source), "recall": 0.5}
    return Predictors(layers=tuple(layers), input="adjacent", norm="rms", meta=meta)


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_packs_as_the_gguf_library_does(rng: np.random.Generator, name: str) -> None:
    values = rng.normal(size=(5, 96)).astype(np.float32)
    values[1, :32] = 0
    raw = quants.quantize(values, GGMLQuantizationType[name.upper()])
    want = quants.dequantize(raw, GGMLQuantizationType[name.upper()])
    got = pack_rows(values, name).dequantize()
    step = np.abs(values).max() / (127 if name == "q8_0" else 8)
    # Scales round at another place; a level may differ where a value lies half way between two.
    assert np.abs(got - want).max() <= 1.01 * step and np.abs(got - want).mean() < 0.02 * step
    assert np.abs(got - values).max() <= 1.01 * step


def test_packing_refuses(rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="rows of 33 weights"):
        pack_rows(rng.normal(size=(2, 33)), "q8_0")
    with pytest.raises(ValueError, match="'q2' is not one of"):
        pack_rows(rng.normal(size=(2, 32)), "q2")
    with pytest.raises(ValueError, match="NaN"):
        pack_rows(np.full((2, 32), np.nan), "q8_0")


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("formats", [("q8_0", "q4_0"), ("f16", "f16"), ("f32", "q8_0")])
def test_comes_back(tmp_path: Path, rng: np.random.Generator, formats: tuple[str, str], rest: bool) -> None:
    want = make(rng, Source(), formats, rest)
    path = save_predictors(tmp_path / "new", want)
    got = load_predictors(tmp_path / "new")
    assert (got.input, got.norm, got.nbytes) == (want.input, want.norm, want.nbytes)
    assert got.meta == want.meta
    np.testing.assert_array_equal(got.thresholds, want.thresholds)
    x = rng.normal(size=(3, D)).astype(np.float32)
    for layer in range(L):
        np.testing.assert_array_equal(got.predict(layer, x), want.predict(layer, x))
        np.testing.assert_array_equal(got.estimate_rest(layer, x), want.estimate_rest(layer, x))
        assert got.estimate_rest(layer, x).any() == rest
    names = ("fc1", "fc2", "rest", "rest_bias") if rest else ("fc1", "fc2")
    with safe_open(path, "np") as file:  # the format's own library reads it
        assert set(file.keys()) == {f"layers.{i}.{n}" for i in range(L) for n in names} | {
            "layers.1.fc1_bias",
            "layers.1.bias",
        }
        assert json.loads(file.metadata()["kairox"])["input"] == "adjacent"


def test_predicts_as_float64_does(rng: np.random.Generator) -> None:
    predictors = make(rng, Source())
    x = rng.normal(size=(4, D)).astype(np.float32) * 30
    for layer, part in enumerate(predictors.layers):
        wide = x.astype(np.float64)
        wide /= np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
        hidden = wide @ part.fc1.dequantize().astype(np.float64).T
        score = np.maximum(hidden + (0 if part.fc1_bias is None else part.fc1_bias), 0)
        score = score @ part.fc2.dequantize().astype(np.float64).T + (0 if part.bias is None else part.bias)
        np.testing.assert_allclose(predictors.predict(layer, x), score, rtol=1e-4, atol=1e-4)
        clear = np.abs(score - part.threshold) > 1e-3
        got = predictors.predicted(layer, x)
        np.testing.assert_array_equal(got[clear], (score >= part.threshold)[clear])
    assert predictors.nbytes == sum((R * D * 34 + F * R * 18) // 32 + 2 * (R + F) * i for i in range(L))


def test_fits_one_model_only(rng: np.random.Generator, tmp_path: Path) -> None:
    source = Source()
    predictors = make(rng, source)
    check_predictors(predictors, source)
    with pytest.raises(ValueError, match="made for tiny, not for this model"):
        check_predictors(predictors, Source(seed=1))
    with pytest.raises(ValueError, match=r"width 32, this model has 2 of 48 and width 64"):
        check_predictors(predictors, Source(d_model=64))
    with pytest.raises(ValueError, match=r"2 layers of 48 neurons and width 32, this model has 2 of 16"):
        check_predictors(predictors, Source(num_neurons=16))
    assert shipped_predictors(source, tmp_path) is None
    save_predictors(tmp_path / "tiny", predictors)
    found = shipped_predictors(source, tmp_path)
    assert found is not None and found.meta["model"] == "tiny"
    assert shipped_predictors(Source(seed=1), tmp_path) is None


def test_damage_is_told_in_one_line(rng: np.random.Generator, tmp_path: Path) -> None:
    def fails(message: str) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            load_predictors(tmp_path)
        assert "\n" not in str(caught.value)

    fails("there is no .*predictors.safetensors")
    path = save_predictors(tmp_path, make(rng, Source()))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    fails("cut off")
    path.write_bytes(whole.replace(b"kairox", b"Xairox"))
    fails("these are no predictors")
    path.write_bytes(whole.replace(b'\\"format\\": 1', b'\\"format\\": 9'))
    fails("not of format 1")
    path.write_bytes(whole.replace(b'\\"thresholds\\"', b'\\"threshoXds\\"'))
    fails("lacks 'thresholds'")
    short = re.sub(rb'("thresholds\\": \[)([^,]+), ', lambda m: m[1] + b" " * (len(m[2]) + 2), whole)
    assert short != whole
    path.write_bytes(short)
    fails("2 layers, 2 with formats, 1 with thresholds")
    path.write_bytes(whole.replace(b"adjacent", b"adjacenX"))
    fails("'adjacenX' is not one of")
    path.write_bytes(whole)
    assert read_meta(path)["num_layers"] == L
    with pytest.raises(ValueError, match="lacks 'fingerprint'"):
        save_predictors(tmp_path, dataclasses.replace(load_predictors(tmp_path), meta={}))


def test_parts_must_agree(rng: np.random.Generator) -> None:
    fc1, fc2 = pack_rows(rng.normal(size=(32, D)), "f16"), pack_rows(rng.normal(size=(F, 64)), "f16")
    with pytest.raises(ValueError, match="fc2 reads 64 hidden units, fc1 gives 32"):
        LayerPredictor(fc1=fc1, fc2=fc2)
    fc2 = pack_rows(rng.normal(size=(F, 32)), "f16")
    with pytest.raises(ValueError, match="bias has shape"):
        LayerPredictor(fc1=fc1, fc2=fc2, bias=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="must be finite"):
        LayerPredictor(fc1=fc1, fc2=fc2, threshold=float("nan"))


@pytest.mark.parametrize("parallel", [False, True])
def test_takes_those_of_a_checkpoint(rng: np.random.Generator, parallel: bool) -> None:
    source = Source(parallel_block=parallel)
    assert checkpoint_predictors(source) is None
    for layer in range(L):
        source.extra[f"layers.{layer}.pred_fc1"] = rng.normal(size=(8, D)).astype(np.float32)
        source.extra[f"layers.{layer}.pred_fc2"] = rng.normal(size=(F, 8)).astype(np.float32)
    source.sparse_threshold = 0.5  # type: ignore[attr-defined]
    got = checkpoint_predictors(source)
    assert got is not None
    assert got.input == ("layer_input" if parallel else "own") and got.norm == "none"
    x = rng.normal(size=(2, D)).astype(np.float32)
    for layer in range(L):
        fc1, fc2 = (source.extra[f"layers.{layer}.pred_{n}"].astype(np.float64) for n in ("fc1", "fc2"))
        np.testing.assert_allclose(
            got.predict(layer, x), np.maximum(x @ fc1.T, 0) @ fc2.T, rtol=1e-4, atol=1e-4
        )
        assert got.layers[layer].threshold == 0.5
    del source.extra["layers.0.pred_fc1"]
    with pytest.raises(ValueError, match="layer 0 has no predictor"):
        checkpoint_predictors(source)
