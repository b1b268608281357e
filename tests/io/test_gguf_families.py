"""Each architecture's GGUF files, written by the converters' rules, against transformers' logits."""

from pathlib import Path
from typing import Any

import gguf_cases as cases
import numpy as np
import pytest
from flax import nnx
from numpy_reference import forward

from kairox_jax import load_model
from kairox_jax.io import FormatError, open_checkpoint
from kairox_jax.models import Decoder

KEY = "kairox.activation"


def write(
    tmp_path: Path, name: str, arch: str, fields: dict[str, Any] | None = None, **options: Any
) -> tuple[Path, np.ndarray, np.ndarray]:
    """Write a case; return the file, the input ids and transformers' logits."""
    keys, tensors = cases.case(name, arch)
    options.setdefault("tensors", tensors)
    path = cases.write_gguf(tmp_path / f"{name}.gguf", arch, keys | (fields or {}), **options)
    with np.load(cases.MODELS / name / "expected.npz") as expected:
        return path, expected["input_ids"], expected["logits"]


def assert_logits(path: Path, ids: np.ndarray, want: np.ndarray, tolerance: float = 2e-4) -> None:
    got = forward(open_checkpoint(path), ids)
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize(
    ("name", "arch", "fields"),
    [
        ("relu-llama", "llama", {KEY: "relu"}),
        ("relu-llama", "llama", {"general.name": "ReluLLaMA 7B"}),
        ("llama-relu2", "llama", {KEY: "relu2"}),
        ("llama-bias-linear", "llama", {KEY: "relu"}),
        ("mistral-window", "llama", {KEY: "relu"}),
        ("prosparse-llama", "llama", {KEY: "fatrelu", "kairox.activation_threshold": 0.01}),
        ("prosparse-llama", "prosparse-llama", {}),
        ("prosparse-llama", "llama", {"general.basename": "prosparse-llama-2"}),
        ("bamboo", "bamboo", {}),
        ("bamboo", "llama", {"general.name": "Bamboo Base V0.1"}),
        ("sparse-qwen2", "sparse-qwen2", {}),
        ("sparse-qwen2", "qwen2", {"qwen2.pred_lora": [0, 0]}),
        ("sparse-qwen2", "qwen2", {"general.name": "SparseQwen2-7B"}),
        ("qwen2-window", "qwen2", {KEY: "relu"}),
        ("opt", "opt", {}),
        ("opt-untied", "opt", {}),
        ("opt-no-bias", "opt", {}),
        ("relu-falcon", "relu-falcon", {}),
        ("relu-falcon", "falcon", {"general.name": "ReluFalcon 40B"}),
        ("falcon-one-kv", "falcon", {KEY: "relu"}),
        ("falcon-one-norm", "falcon", {KEY: "relu"}),
    ],
)
def test_logits(name: str, arch: str, fields: dict[str, Any], tmp_path: Path) -> None:
    assert_logits(*write(tmp_path, name, arch, fields))


@pytest.mark.parametrize("name", ["llama3-rope", "llama-old-keys"])
def test_llama3_frequencies(name: str, tmp_path: Path) -> None:
    """They are a tensor of divisors; without it the logits are others."""
    _, tensors = cases.case(name, "llama")
    factors = cases.llama3_factors(cases.case_config(name))
    assert_logits(*write(tmp_path, name, "llama", tensors=tensors | {"rope_freqs.weight": factors}))
    path, ids, want = write(tmp_path, name, "llama")
    assert np.abs(forward(open_checkpoint(path), ids) - want).max() > 0.01 * np.abs(want).max()


@pytest.mark.parametrize(
    ("name", "arch"), [("llama3-rope", "llama"), ("opt-untied", "opt"), ("relu-falcon", "relu-falcon")]
)
def test_through_load_model(name: str, arch: str, tmp_path: Path) -> None:
    _, tensors = cases.case(name, arch)
    if name == "llama3-rope":
        tensors["rope_freqs.weight"] = cases.llama3_factors(cases.case_config(name))
    path, ids, want = write(tmp_path, name, arch, tensors=tensors)
    got = np.asarray(nnx.jit(Decoder.__call__)(load_model(path), ids))
    assert np.abs(got - want).max() <= 2e-4 * np.abs(want).max()


def test_old_key_of_linear_scaling(tmp_path: Path) -> None:
    keys, tensors = cases.case("llama-bias-linear", "llama")
    del keys["llama.rope.scaling.type"]
    factor = keys.pop("llama.rope.scaling.factor")
    old = keys | {"llama.rope.scale_linear": factor, KEY: "relu"}
    path = cases.write_gguf(tmp_path / "old.gguf", "llama", old, tensors)
    _, ids, want = write(tmp_path, "llama-bias-linear", "llama", {KEY: "relu"})
    assert_logits(path, ids, want)


@pytest.mark.parametrize(
    ("fields", "kind", "factor"),
    [
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None, None),
        ({"llama.rope.scaling.type": "linear"}, None, None),
        ({"llama.rope.scaling.factor": 0.0}, None, None),
        ({"llama.rope.scaling.factor": 2.0}, "linear", 2.0),
        ({"llama.rope.scaling.factor": 2.0, "llama.rope.scale_linear": 2.0}, "linear", 2.0),
    ],
)
def test_rope_scaling(fields: dict[str, Any], kind: str | None, factor: float | None, tmp_path: Path) -> None:
    path, _, _ = write(tmp_path, "llama-relu2", "llama", {KEY: "relu2"} | fields)
    scaling = open_checkpoint(path).config.rope_scaling
    assert (
        (None, None) == (kind, factor)
        if scaling is None
        else (scaling.kind, scaling.factor) == (kind, factor)
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not supported .it also rescales attention"),
        ({"llama.rope.scaling.type": "new"}, "'new' is not supported .unknown"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "attn_factor: 1.5 is not supported"),
        ({"llama.rope.scaling.factor": -2.0}, "factor: -2.0 must be positive"),
        (
            {"llama.rope.scaling.factor": 2.0, "llama.rope.scale_linear": 4.0},
            "scale_linear: 4.0 disagrees with llama.rope.scaling.factor 2.0",
        ),
        ({"split.count": 2}, "split.count: .*gguf-split --merge"),
        ({KEY: "gelu"}, "kairox.activation: 'gelu' is not one of silu"),
        ({KEY: "fatrelu"}, "kairox.activation_threshold: missing"),
        ({"general.name": "NewReLU-LM 3B"}, "general.name: .*hints at a sparse activation"),
        ({"general.source.url": "https://example.org/SparseLLM/x"}, "hints at a sparse activation"),
        ({"llama.attention.sliding_window_pattern": 4}, "sliding_window_pattern: 4 is not supported"),
    ],
)
def test_refuses(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    path, _, _ = write(tmp_path, "llama-relu2", "llama", fields)
    with pytest.raises(FormatError, match=message) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (np.ones(5), r"shape \(5,\); expected one factor for each of 4 frequencies"),
        (np.array([1.0, 0.1, 0.01, 0.001]), "values below 1"),
        (np.array([1.0, np.nan, 1, 1]), "not finite"),
    ],
)
def test_refuses_rope_factors(factors: np.ndarray, message: str, tmp_path: Path) -> None:
    _, tensors = cases.case("llama-old-keys", "llama")
    tensors["rope_freqs.weight"] = factors.astype(np.float32)
    path, _, _ = write(tmp_path, "llama-old-keys", "llama", tensors=tensors)
    with pytest.raises(FormatError, match=message):
        open_checkpoint(path)


def test_a_falcon_is_gelu_unless_it_says_otherwise(tmp_path: Path) -> None:
    path, _, _ = write(tmp_path, "relu-falcon", "falcon")
    with pytest.raises(FormatError, match="'falcon' files compute GELU, which is not supported"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "activation", "word"),
    [("ReluLLaMA 7B", "relu", "general.name 'ReluLLaMA 7B'"), ("Prelude 7B", "silu", "architecture 'llama'")],
)
def test_says_what_decided_the_activation(
    name: str, activation: str, word: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _, _ = write(tmp_path, "relu-llama", "llama", {"general.name": name})
    with caplog.at_level("INFO", "kairox"):
        checkpoint = open_checkpoint(path)
    assert (checkpoint.config.activation, checkpoint.activation_source) == (activation, word)
    assert ("decided by general.name" in caplog.text) == (activation == "relu")


def test_a_tensor_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """Norms of q and k would change the result."""
    _, tensors = cases.case("relu-llama", "llama")
    tensors["blk.0.attn_q_norm.weight"] = np.ones(16, np.float32)
    path, _, _ = write(tmp_path, "relu-llama", "llama", {KEY: "relu"}, tensors=tensors)
    with pytest.raises(FormatError, match="blk.0.attn_q_norm.weight: is not part of this architecture"):
        open_checkpoint(path)


def test_the_same_value_for_each_layer(tmp_path: Path) -> None:
    fields = {KEY: "relu", "llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [160, 160]}
    path, ids, want = write(tmp_path, "relu-llama", "llama", fields)
    assert_logits(path, ids, want)
    path, _, _ = write(tmp_path, "relu-llama", "llama", fields | {"llama.attention.head_count_kv": [2, 1]})
    with pytest.raises(FormatError, match="head_count_kv: '.2 1.' where a value of type int"):
        open_checkpoint(path)
