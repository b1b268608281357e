"""The synthetic ReLU-LLaMA: a file that the package reads, with the sparsity it promises."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks.make_relu_llama import CODES, Shapes, main, pack
from kairox_jax.io import open_checkpoint
from kairox_jax.models import streamed_logits


@pytest.mark.parametrize("name", CODES)
def test_blocks_are_ggmls(name: str, rng: np.random.Generator) -> None:
    largest = CODES[name][1]
    codes = rng.integers(-largest, largest + 1, (5, 64), np.int8)
    kind = gguf.GGMLQuantizationType[name.upper()]
    want = codes * np.float32(0.125)
    np.testing.assert_array_equal(gguf.quants.dequantize(pack(codes, 0.125, name), kind), want)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", CODES)
def test_the_file_is_a_relu_model_of_its_sparsity(default_model: Path, tmp_path: Path, name: str) -> None:
    shapes = Shapes(num_layers=3, d_model=256, num_neurons=1024, num_heads=8, num_kv_heads=2)
    sizes = [
        word for key, value in vars(shapes).items() for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    path = tmp_path / "model.gguf"
    assert main([str(path), "--format", name, "--tokenizer", str(default_model), *sizes]) == 0
    source = open_checkpoint(path)
    assert source.config.activation == "relu" and source.config.num_neurons == 1024
    assert source.packed_format("layers.0.w_gate") == name
    ids = np.asarray(source.tokenizer().encode("Once upon a time there was a miller"), np.int32)[None]
    logits, active_frac = streamed_logits(source, ids)
    assert np.isfinite(logits).all() and logits.std() > 0.1
    assert 0.05 < active_frac < 0.25


def test_mistakes_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "x.gguf"), "--tokenizer", str(tmp_path / "no.gguf")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("make_relu_llama: error: ") and error.count("\n") == 1
