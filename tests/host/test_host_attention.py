"""Attention on the host against the Flax module, and both against NumPy float64."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kairox_jax.config import ModelConfig
from kairox_jax.host import AttentionWeights, HostAttention, host_norm
from kairox_jax.models import Attention, KVCache, rms_norm, rotary_frequencies
from kairox_jax.quant import PackedRows

TOLERANCE = 1e-5  # relative
LENGTH = 64
CONFIG = ModelConfig(
    family="llama",
    num_layers=1,
    d_model=96,
    num_neurons=8,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=8,
    context_length=LENGTH,
    activation="silu",
)
POSITIONS = {
    "first": [0],
    "second": [1],
    "middle": [17],
    "last": [LENGTH - 1],
    "two alike": [9, 9],
    "two apart": [0, 40],
    "two ends": [LENGTH - 1, 3],
}


def packed(values: np.ndarray, name: str) -> PackedRows:
    """Quantise with the gguf library."""
    if name == "f32":
        return PackedRows(data=np.ascontiguousarray(values).view(np.uint8), format=name)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name.upper()])
    return PackedRows(data=np.ascontiguousarray(raw), format=name)


class Case:
    """Random weights, cache and input of one attention block."""

    def __init__(self, rng: np.random.Generator, name: str, batch: int) -> None:
        heads = CONFIG.num_heads + 2 * CONFIG.num_kv_heads

        def draw(*shape: int) -> np.ndarray:
            return rng.normal(size=shape).astype(np.float32)

        width = CONFIG.num_heads * CONFIG.head_dim
        self.norm, self.ffn_norm = 1 + 0.2 * draw(CONFIG.d_model), 1 + 0.2 * draw(CONFIG.d_model)
        self.wqkv = packed(draw(heads * CONFIG.head_dim, CONFIG.d_model) / 8, name)
        self.wo = packed(draw(CONFIG.d_model, width) / 8, name)
        shape = (batch, CONFIG.num_kv_heads, LENGTH, CONFIG.head_dim)
        self.keys, self.values, self.x = draw(*shape), draw(*shape), draw(batch, CONFIG.d_model)

    def host(self, positions: list[int]) -> tuple[np.ndarray, ...]:
        """Return x, h, keys and values after the host's block."""
        start = np.array(positions, np.int32)
        angle = start[:, None].astype(np.float32) * rotary_frequencies(CONFIG)[None, :]
        x, keys, values = self.x.copy(), self.keys.copy(), self.values.copy()
        weights = AttentionWeights(norm=self.norm, ffn_norm=self.ffn_norm, wqkv=self.wqkv, wo=self.wo)
        runner = HostAttention(CONFIG, batch=len(positions), length=LENGTH)
        h = runner.front(weights, x, keys, values, start, np.cos(angle), np.sin(angle))
        return x, h.copy(), keys, values

    def flax(self, positions: list[int]) -> tuple[np.ndarray, ...]:
        """Return the same of the Flax module with the same, unpacked weights."""
        module = Attention(CONFIG, rngs=nnx.Rngs(0))
        module.norm = nnx.Param(jnp.asarray(self.norm))
        module.wqkv = nnx.Param(jnp.asarray(self.wqkv.dequantize()))
        module.wo = nnx.Param(jnp.asarray(self.wo.dequantize()))
        cache = KVCache(jnp.array(self.keys), jnp.array(self.values))
        y, cache = module(jnp.asarray(self.x)[:, None], jnp.array(positions, jnp.int32), cache)
        x = jnp.asarray(self.x) + y[:, 0]
        h = rms_norm(x, jnp.asarray(self.ffn_norm), CONFIG.norm_eps)
        return np.asarray(x), np.asarray(h), np.asarray(cache.k), np.asarray(cache.v)

    def numpy(self, positions: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return x and h in float64, head by head."""
        x = self.x.astype(np.float64)
        wqkv, wo = self.wqkv.dequantize().astype(np.float64), self.wo.dequantize().astype(np.float64)
        n, k, size = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim
        half = np.arange(size // 2)
        for b, at in enumerate(positions):
            heads = (normed(x[b], self.norm) @ wqkv.T).reshape(n + 2 * k, size)
            turn = np.exp(1j * at * CONFIG.rope_theta ** (-2 * half / size))
            pairs = (heads[: n + k, : size // 2] + 1j * heads[: n + k, size // 2 :]) * turn
            turned = np.concatenate([pairs.real, pairs.imag], axis=1)
            mixed = np.zeros((n, size))
            for head in range(n):
                group = head // (n // k)
                keys = np.vstack([self.keys[b, group, :at], turned[n + group]])
                values = np.vstack([self.values[b, group, :at], heads[n + k + group]])
                weight = np.exp(keys @ turned[head] / np.sqrt(size))
                mixed[head] = weight / weight.sum() @ values
            x[b] += mixed.reshape(-1) @ wo.T
        return x, np.stack([normed(row, self.ffn_norm) for row in x])


def normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x) + CONFIG.norm_eps) * scale


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    error = float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
    return error if np.isfinite(error) else float("inf")


@pytest.mark.parametrize("name", ["f32", "q8_0", "q4_1"])
@pytest.mark.parametrize("where", POSITIONS)
def test_one_token(rng: np.random.Generator, name: str, where: str) -> None:
    positions = POSITIONS[where]
    case = Case(rng, name, len(positions))
    host, flax, exact = case.host(positions), case.flax(positions), case.numpy(positions)
    for got, want in zip(host, flax, strict=True):
        assert got.dtype == np.float32 and relative_error(got, want) < TOLERANCE
    for got, want in zip(host[:2], exact, strict=True):
        assert relative_error(got, want) < TOLERANCE


def test_only_the_new_position_of_the_cache_is_written(rng: np.random.Generator) -> None:
    case, positions = Case(rng, "f32", 2), [5, 30]
    _, _, keys, values = case.host(positions)
    for old, new in ((case.keys, keys), (case.values, values)):
        changed = (old != new).any(axis=(1, 3))
        assert [np.flatnonzero(row).tolist() for row in changed] == [[5], [30]]


def test_later_positions_of_the_cache_are_not_read(rng: np.random.Generator) -> None:
    case, positions = Case(rng, "q8_0", 2), [5, 30]
    want = case.host(positions)[1]
    for b, at in enumerate(positions):
        case.keys[b, :, at:] = case.values[b, :, at:] = np.nan
    np.testing.assert_array_equal(case.host(positions)[1], want)


def test_a_sequence_does_not_see_another(rng: np.random.Generator) -> None:
    case = Case(rng, "q4_1", 2)
    both = case.host([8, 21])[0]
    case.x, case.keys, case.values = case.x[1:], case.keys[1:], case.values[1:]
    np.testing.assert_allclose(case.host([21])[0][0], both[1], rtol=1e-6)


def test_large_scores_do_not_overflow(rng: np.random.Generator) -> None:
    case = Case(rng, "f32", 1)
    case.keys *= 1e4
    for got, want in zip(case.host([12]), case.flax([12]), strict=True):
        assert relative_error(got, want) < 1e-4


def test_host_norm(rng: np.random.Generator) -> None:
    x, scale = rng.normal(size=(2, 96)).astype(np.float32), rng.normal(size=96).astype(np.float32)
    want = np.stack([normed(row, scale.astype(np.float64)) for row in x.astype(np.float64)])
    assert relative_error(host_norm(x, scale, None, CONFIG.norm_eps), want) < 1e-6
