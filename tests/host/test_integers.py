"""Products with int8 inputs: exact against the rounding written out in NumPy, and close to the unrounded product."""

import os
import platform
import subprocess
import sys

import numpy as np
import pytest
from test_kernels import NUM_NEURONS, clear_cut, packed, relative_error

from kairox_jax.config import HOST_ACTIVATIONS
from kairox_jax.host import MAX_BATCH, Rule, matvec, reference, residual_ffn
from kairox_jax.quant import RecordLayout

ROUNDED = 5e-3  # of a product, against the unrounded one, relative
FFN_ROUNDED = 8e-3  # gate and up err independently: the square root of two times a product's error
SUMS = 1e-6  # against the same with rounded inputs
FORMATS = ("q8_0", "q4_0", "q4_1")
pytestmark = pytest.mark.slow  # many forms to compile


def rounded(x: np.ndarray) -> np.ndarray:
    """Round as the kernels say: groups of 4 inputs for one token, of 8 for several; their largest becomes 127."""
    groups = x.astype(np.float64).reshape(len(x), -1, 4 if len(x) == 1 else 8)
    most = np.abs(groups).max(axis=-1, keepdims=True)
    codes = np.rint(groups * np.divide(127, most, out=np.zeros_like(most), where=most > 0))
    return (codes * most / 127).reshape(x.shape)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("batch", range(1, MAX_BATCH + 1))
def test_products_are_those_of_rounded_inputs(name: str, batch: int, rng: np.random.Generator) -> None:
    for num in (32, 64, 576, 4096):
        matrix = packed(rng, 70, num, name)
        x, out = rng.normal(size=(batch, num)).astype(np.float32), np.full((batch, 70), np.nan, np.float32)
        matvec(x, matrix, out, activations="int8")
        weights = matrix.dequantize().astype(np.float64)
        most = np.abs(rounded(x)) @ np.abs(weights).T
        assert np.linalg.norm(out - rounded(x) @ weights.T) <= SUMS * np.linalg.norm(most)
        if num >= 576:
            assert relative_error(out, x.astype(np.float64) @ weights.T) <= ROUNDED


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("batch", [1, 3, MAX_BATCH])
def test_extreme_codes_do_not_saturate(name: str, batch: int, rng: np.random.Generator) -> None:
    matrix = packed(rng, 64, 64, name)
    blocks = matrix.data.reshape(64, 2, -1)
    blocks[:32, :, -16 if name != "q8_0" else -32 :] = 0x80 if name == "q8_0" else 0xFF
    blocks[32:, :, -16 if name != "q8_0" else -32 :] = 0x7F if name == "q8_0" else 0x00
    for sign in (1, -1):
        x, out = np.full((batch, 64), sign * 3.0, np.float32), np.zeros((batch, 64), np.float32)
        matvec(x, matrix, out, activations="int8")
        want = x.astype(np.float64) @ matrix.dequantize().astype(np.float64).T
        assert relative_error(out, want) <= SUMS  # such inputs are rounded without error


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("batch", [1, 5])
def test_zeros_tiny_numbers_and_what_is_not_finite(name: str, batch: int, rng: np.random.Generator) -> None:
    matrix = packed(rng, 40, 64, name)
    x, out = np.zeros((batch, 64), np.float32), np.full((batch, 40), np.nan, np.float32)
    matvec(x, matrix, out, activations="int8")
    assert (out == 0).all()
    x[0, :8] = [1e-40, -1e-38, 0, 1e-42, 1e-45, 0, 0, 1e-39]
    matvec(x, matrix, out, activations="int8")
    assert np.abs(out).max() <= 1e-29
    for wrong in (np.nan, np.inf, -np.inf):
        x = rng.normal(size=(batch, 64)).astype(np.float32)
        x[0, 37] = wrong
        matvec(x, matrix, out, activations="int8")
        assert not np.isfinite(out[0]).any() and np.isfinite(out[1:]).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("batch", [1, 2, MAX_BATCH])
@pytest.mark.parametrize(("rows", "rule"), [(3, Rule.SILU), (3, Rule.FATRELU), (2, Rule.RELU)])
def test_ffn_of_rounded_inputs(
    name: str, batch: int, rows: int, rule: Rule, rng: np.random.Generator
) -> None:
    num = 576
    layout = RecordLayout(num_elems=num, formats=(name,) * (rows - 1) + ("f32",))
    raw = np.zeros((NUM_NEURONS, layout.record_bytes), np.uint8)
    for row, format in enumerate(layout.formats):
        layout.put(raw, row, packed(rng, NUM_NEURONS, num, format))
    x = rng.normal(size=(batch, num)).astype(np.float32)
    ids = clear_cut(rounded(x).astype(np.float32), layout.unpack(raw), None, rule, 0.1)
    out, active = np.zeros_like(x), np.zeros((batch, ids.size), np.uint8)
    residual_ffn(x, raw, None, ids, ids.size, rule, 0.1, out, active, layout=layout, activations="int8")
    for inputs, tolerance in ((rounded(x), 1e-5), (x, FFN_ROUNDED)):
        want, fired = np.zeros(x.shape), np.zeros_like(active)
        reference.residual_ffn(inputs, raw, None, ids, ids.size, rule, 0.1, want, fired, layout=layout)
        assert relative_error(out, want) <= tolerance
        assert (fired != active).mean() <= (0 if tolerance == 1e-5 else 0.01)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_other_formats_take_floats_as_they_are(name: str, rng: np.random.Generator) -> None:
    matrix, x = packed(rng, 40, 64, name), rng.normal(size=(1, 64)).astype(np.float32)
    outs = [np.zeros((1, 40), np.float32) for _ in HOST_ACTIVATIONS]
    for out, activations in zip(outs, HOST_ACTIVATIONS, strict=True):
        matvec(x, matrix, out, activations=activations)
    np.testing.assert_array_equal(outs[0], outs[1])


def test_unknown_activations_are_named(rng: np.random.Generator) -> None:
    x, out = np.zeros((1, 64), np.float32), np.zeros((1, 4), np.float32)
    with pytest.raises(ValueError, match="activations 'int4' are not one of float32, int8"):
        matvec(x, packed(rng, 4, 64, "q8_0"), out, activations="int4")


SMALL_RUN = """
import numpy as np
from kairox_jax.host import matvec
from kairox_jax.quant import PackedRows
rng = np.random.default_rng(0)
for name, row_bytes in (("q8_0", 68), ("q4_0", 36), ("q4_1", 40)):
    for batch in (1, 3, 8):
        data = rng.integers(0, 256, (50, row_bytes), np.uint8)
        blocks = data.reshape(50, 2, -1)
        blocks[..., 1] &= 0xBB
        blocks[..., 3] &= 0xBB if name == "q4_1" else 0xFF
        x = rng.choice([-1.0, 1.0], (batch, 64)).astype(np.float32)
        out = np.zeros((batch, 50), np.float32)
        matrix = PackedRows(data=data, format=name)
        matvec(x, matrix, out, activations="int8")
        want = x.astype(float) @ matrix.dequantize().T.astype(float)
        assert np.linalg.norm(out - want) <= 1e-6 * np.linalg.norm(want), (name, batch)
print("done")
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 processors")
@pytest.mark.parametrize(
    ("cpu", "features"), [("haswell", "+avx,+avx2,+fma,+f16c"), ("x86-64", "")], ids=["AVX2", "plain"]
)
def test_older_processors_compute_the_same(tmp_path, cpu: str, features: str) -> None:
    env = {
        **os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features
    }  # fmt: skip
    result = subprocess.run([sys.executable, "-c", SMALL_RUN], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"
