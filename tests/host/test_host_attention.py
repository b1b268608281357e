"""Attention on the host against the Flax module, and both against NumPy float64."""

from dataclasses import replace
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kairox_jax.config import ModelConfig
from kairox_jax.host import AttentionWeights, HostAttention, host_norm
from kairox_jax.models import Attention, KVCache, normalise, rotary_frequencies
from kairox_jax.quant import PackedRows

TOLERANCE = 1e-5  # relative
ROUNDED = 2e-2  # with rounded inputs of two products and of the softmax between them
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
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 7},
    "biases": {"qkv_bias": True, "out_bias": True},
    "layer norm, parallel": {"norm": "layernorm", "parallel_block": True},
    "learned positions": {"norm": "layernorm", "positions": "learned", "qkv_bias": True},
    "odd sizes": {"d_model": 90, "head_dim": 10, "sliding_window": 1, "parallel_block": True},
}
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

    def __init__(self, rng: np.random.Generator, name: str, batch: int, variant: str = "plain") -> None:
        self.config = config = replace(CONFIG, **VARIANTS[variant])
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim

        def draw(*shape: int) -> np.ndarray:
            return rng.normal(size=shape).astype(np.float32)

        dim, width = config.d_model, config.num_heads * config.head_dim
        self.norm, self.ffn_norm = 1 + 0.2 * draw(dim), 1 + 0.2 * draw(dim)
        self.wqkv, self.wo = packed(draw(rows, dim) / 8, name), packed(draw(dim, width) / 8, name)
        shape = (batch, config.num_kv_heads, LENGTH, config.head_dim)
        self.keys, self.values, self.x = draw(*shape), draw(*shape), 1 + draw(batch, dim)
        shifted = config.norm == "layernorm"
        lengths = {"norm_bias": dim * shifted, "ffn_norm_bias": dim * shifted}
        lengths |= {"bqkv": rows * config.qkv_bias, "bo": dim * config.out_bias}
        self.biases = {name: draw(length) for name, length in lengths.items() if length}

    def host(
        self, positions: list[int], activations: str = "float32", cache_rows: list[int] | None = None
    ) -> tuple[np.ndarray, ...]:
        """Return x, h, keys and values after the host's block; with ``cache_rows`` as tokens of prompts."""
        start = np.array(positions, np.int32)
        rotary = self.config.positions == "rotary"
        frequencies = rotary_frequencies(self.config) if rotary else np.empty(0, np.float32)
        angle = start[:, None].astype(np.float32) * frequencies[None, :]
        x, keys, values = self.x.copy(), self.keys.copy(), self.values.copy()
        matrices = {"wqkv": self.wqkv, "wo": self.wo}
        weights = AttentionWeights(norm=self.norm, ffn_norm=self.ffn_norm, **matrices, **self.biases)
        runner = HostAttention(
            self.config, batch=min(8, len(positions)), length=LENGTH, activations=activations
        )
        run = runner.front if cache_rows is None else runner.prompt
        rows = np.arange(len(start), dtype=np.int32) if cache_rows is None else np.array(cache_rows, np.int32)
        h = run(weights, x, keys, values, rows, start, np.cos(angle), np.sin(angle))
        return x, h.copy(), keys, values

    def flax(self, positions: list[int], count: int = 1) -> tuple[np.ndarray, ...]:
        """Return the same of the Flax module with the same, unpacked weights, ``count`` tokens of each sequence."""
        module = Attention(self.config, rngs=nnx.Rngs(0))
        for name, bias in self.biases.items():
            if name != "ffn_norm_bias":
                setattr(module, name, nnx.Param(jnp.asarray(bias)))
        module.norm = nnx.Param(jnp.asarray(self.norm))
        module.wqkv = nnx.Param(jnp.asarray(self.wqkv.dequantize()))
        module.wo = nnx.Param(jnp.asarray(self.wo.dequantize()))
        cache = KVCache(jnp.array(self.keys), jnp.array(self.values))
        inputs = jnp.asarray(self.x).reshape(len(positions), count, -1)
        y, cache = module(inputs, jnp.array(positions, jnp.int32), cache)
        x = jnp.asarray(self.x) + y.reshape(self.x.shape)
        before = jnp.asarray(self.x) if self.config.parallel_block else x
        shift = self.biases.get("ffn_norm_bias")
        shift = None if shift is None else jnp.asarray(shift)
        h = normalise(before, jnp.asarray(self.ffn_norm), shift, CONFIG.norm_eps)
        return np.asarray(x), np.asarray(h), np.asarray(cache.k), np.asarray(cache.v)

    def numpy(self, positions: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return x and h in float64, head by head."""
        config, x = self.config, self.x.astype(np.float64)
        before = x.copy()
        wqkv, wo = self.wqkv.dequantize().astype(np.float64), self.wo.dequantize().astype(np.float64)
        n, k, size = config.num_heads, config.num_kv_heads, config.head_dim
        half = np.arange(size // 2)
        for b, at in enumerate(positions):
            heads = self.normed(x[b], self.norm, "norm_bias") @ wqkv.T + self.biases.get("bqkv", 0.0)
            heads = heads.reshape(n + 2 * k, size)
            turn = np.exp(1j * at * config.rope_theta ** (-2 * half / size))
            turn = turn if config.positions == "rotary" else 1.0
            first = 0 if config.sliding_window is None else max(0, at + 1 - config.sliding_window)
            pairs = (heads[: n + k, : size // 2] + 1j * heads[: n + k, size // 2 :]) * turn
            turned = np.concatenate([pairs.real, pairs.imag], axis=1)
            mixed = np.zeros((n, size))
            for head in range(n):
                group = head // (n // k)
                keys = np.vstack([self.keys[b, group, first:at], turned[n + group]])
                values = np.vstack([self.values[b, group, first:at], heads[n + k + group]])
                weight = np.exp(keys @ turned[head] / np.sqrt(size))
                mixed[head] = weight / weight.sum() @ values
            x[b] += mixed.reshape(-1) @ wo.T + self.biases.get("bo", 0.0)
        seen = before if config.parallel_block else x
        return x, np.stack([self.normed(row, self.ffn_norm, "ffn_norm_bias") for row in seen])

    def normed(self, x: np.ndarray, scale: np.ndarray, bias: str) -> np.ndarray:
        return normed(x, scale, self.biases.get(bias))


def normed(x: np.ndarray, scale: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    if bias is None:
        return x / np.sqrt(np.mean(x * x) + CONFIG.norm_eps) * scale
    return (x - x.mean()) / np.sqrt(x.var() + CONFIG.norm_eps) * scale + bias


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    error = float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
    return error if np.isfinite(error) else float("inf")


@pytest.mark.parametrize("name", ["f32", pytest.param("q4_1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", POSITIONS)
def test_one_token(rng: np.random.Generator, name: str, where: str) -> None:
    positions = POSITIONS[where]
    case = Case(rng, name, len(positions))
    host, flax, exact = case.host(positions), case.flax(positions), case.numpy(positions)
    for got, want in zip(host, flax, strict=True):
        assert got.dtype == np.float32 and relative_error(got, want) < TOLERANCE
    for got, want in zip(host[:2], exact, strict=True):
        assert relative_error(got, want) < TOLERANCE


@pytest.mark.parametrize("where", ["first", "second", "middle", "two ends"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_token_of_each_kind_of_block(rng: np.random.Generator, variant: str, where: str) -> None:
    positions = POSITIONS[where]
    case = Case(rng, "f32", len(positions), variant)
    host, flax, exact = case.host(positions), case.flax(positions), case.numpy(positions)
    for got, want in zip(host, flax, strict=True):
        assert got.dtype == np.float32 and relative_error(got, want) < TOLERANCE
    for got, want in zip(host[:2], exact, strict=True):
        assert relative_error(got, want) < TOLERANCE


@pytest.mark.parametrize("start", [[0], [17], [LENGTH - 33], [3, 26, 0]])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_of_each_kind_of_block(rng: np.random.Generator, variant: str, start: list[int]) -> None:
    """One token more than are multiplied together; and of several prompts, from other positions on."""
    count = 33 if len(start) == 1 else 14
    case = Case(rng, "f32", len(start), variant)
    case.x = 1 + rng.normal(size=(len(start) * count, case.config.d_model)).astype(np.float32)
    positions = [first + t for first in start for t in range(count)]
    rows = [row for row in range(len(start)) for _ in range(count)]
    host, flax = case.host(positions, cache_rows=rows), case.flax(start, count)
    for got, want in zip(host, flax, strict=True):
        assert got.dtype == np.float32 and relative_error(got, want) < TOLERANCE


@pytest.mark.parametrize("name", ["f32", pytest.param("q8_0", marks=pytest.mark.slow)])
def test_a_prompt_gives_the_same_bits_in_any_pieces(rng: np.random.Generator, name: str) -> None:
    case, count = Case(rng, name, 2), 40
    x = case.x = 1 + rng.normal(size=(count, CONFIG.d_model)).astype(np.float32)
    whole = case.host([*range(5, 5 + count)], cache_rows=[1] * count)
    found = []
    for first, last in ((0, 1), (1, 38), (38, count)):
        case.x = x[first:last]
        found.append(case.host([*range(5 + first, 5 + last)], cache_rows=[1] * (last - first)))
        case.keys, case.values = found[-1][2:]
    for place in (0, 1):
        np.testing.assert_array_equal(np.concatenate([part[place] for part in found]), whole[place])
    np.testing.assert_array_equal(case.keys, whole[2])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "where"), [("q4_1", "middle"), ("q8_0", "two ends")])
def test_int8_activations_stay_close(rng: np.random.Generator, name: str, where: str) -> None:
    case = Case(rng, name, len(POSITIONS[where]))
    rounded, exact = case.host(POSITIONS[where], "int8"), case.numpy(POSITIONS[where])
    for got, want in zip(rounded[:2], exact, strict=True):
        assert TOLERANCE < relative_error(got, want) < ROUNDED


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


@pytest.mark.parametrize("shifted", [False, True])
def test_host_norm(rng: np.random.Generator, shifted: bool) -> None:
    x, scale = (1 + rng.normal(size=(2, 96))).astype(np.float32), rng.normal(size=96).astype(np.float32)
    bias = rng.normal(size=96).astype(np.float32) if shifted else None
    want = np.stack([normed(row, scale.astype(np.float64), bias) for row in x.astype(np.float64)])
    got = host_norm(x, scale, bias, CONFIG.norm_eps)
    assert got.dtype == np.float32 and relative_error(got, want) < 1e-6


def test_mistakes_are_refused_before_anything_is_written(rng: np.random.Generator) -> None:
    case = Case(rng, "f32", 2)
    runner = HostAttention(case.config, batch=2, length=LENGTH)
    weights = AttentionWeights(norm=case.norm, ffn_norm=case.ffn_norm, wqkv=case.wqkv, wo=case.wo)
    half = case.config.head_dim // 2

    def frozen(array: np.ndarray) -> np.ndarray:
        copy = array.copy()
        copy.flags.writeable = False
        return copy

    turn = np.zeros((2, half), np.float32)
    good = dict(
        x=case.x, keys=case.keys, values=case.values, cache_rows=np.arange(2, dtype=np.int32),
        positions=np.zeros(2, np.int32), cos=turn, sin=turn,
    )  # fmt: skip
    three = {name: np.zeros(3, np.int32) for name in ("cache_rows", "positions")}
    wrong: list[tuple[str, dict[str, np.ndarray]]] = [
        ("expected C-contiguous float32", {"x": np.zeros((2, CONFIG.d_model + 1), np.float32)}),
        ("expected C-contiguous float32", {"x": case.x.astype(np.float64)}),
        ("x cannot be written", {"x": frozen(case.x)}),
        ("keys cannot be written", {"keys": frozen(case.keys)}),
        ("values is float32", {"values": case.values[..., :-1].copy()}),
        ("cos is float32", {"cos": turn[:1]}),
        ("positions are int64", {"positions": np.zeros(2, np.int64)}),
        ("at most 2 in a step", {"x": np.zeros((3, CONFIG.d_model), np.float32), **three,
                                 "cos": np.zeros((3, half), np.float32), "sin": np.zeros((3, half), np.float32)}),
    ]  # fmt: skip
    before = [case.x.copy(), case.keys.copy(), case.values.copy()]
    for message, change in wrong:
        with pytest.raises(ValueError, match=message):
            runner.front(weights, **{**good, **change})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x cannot be written"):
        runner.prompt(weights, **{**good, "x": frozen(case.x)})  # type: ignore[arg-type]
    for old, now in zip(before, (case.x, case.keys, case.values), strict=True):
        np.testing.assert_array_equal(now, old)
