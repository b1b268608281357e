"""A ReLU model of given shapes, made on the fly: random q8_0 neurons of which about 15 % are active, some often.

The embedding has a constant part in its first columns that no layer changes; each gate row weighs it by its own
bias, so that a neuron's frequency is known beforehand.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from kairox_jax.config import ModelConfig
from kairox_jax.quant import PackedRows

ACTIVE_FRAC = 0.15
CONSTANT = (
    4  # columns that hold the constant part; four, so that 8-bit codes reach the biases that are needed
)
BIAS_SPREAD = 1.2
_CODE_STD = 73.3  # of whole numbers from -127 to 127
_FFN_STD, _ATTENTION_STD = 0.1, 0.01  # what a layer adds to the residual stream, whose random part has 1


class SyntheticModel:
    """A source of weights as ``load_store`` and ``DeviceDense`` read them.

    Args:
        num_layers, d_model, num_neurons, num_heads, vocab_size: L, D (a multiple of 32), F, N and V.
        seed: of the weights.
    """

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        num_neurons: int,
        num_heads: int,
        vocab_size: int,
        *,
        seed: int = 0,
    ) -> None:
        self.config = ModelConfig(
            family="llama", num_layers=num_layers, d_model=d_model, num_neurons=num_neurons,
            num_heads=num_heads, num_kv_heads=num_heads, head_dim=d_model // num_heads,
            vocab_size=vocab_size, context_length=512, activation="relu",
        )  # fmt: skip
        rng = np.random.default_rng(seed)
        mean = _quantile(ACTIVE_FRAC) * math.sqrt(1 + BIAS_SPREAD**2)
        self.biases = rng.normal(mean, BIAS_SPREAD, (num_layers, num_neurons)).clip(-3.4, 3.4)
        largest = max(num_neurons, vocab_size) * d_model
        # All weights are windows of one pool: drawing billions of numbers would take minutes.
        self._pool = rng.integers(-127, 128, largest + (1 << 20), np.int8)

    @property
    def frequencies(self) -> Float[np.ndarray, "L F"]:
        """How often each neuron is active, by its bias: the offline profile of the policies."""
        return np.vectorize(_normal_cdf)(self.biases).astype(np.float32)

    def tensor(self, name: str) -> np.ndarray:
        """Return a fresh float32 array by canonical name."""
        d, heads = self.config.d_model, self.config.num_heads * self.config.head_dim
        kind = name.rsplit(".", 1)[-1]
        if kind.endswith("norm"):
            return np.ones(d, np.float32)
        if kind in ("wq", "wk", "wv"):
            return self._random(name, (heads, d), d**-0.5)
        if kind == "wo":
            matrix = self._random(name, (d, heads), _ATTENTION_STD)
            matrix[:CONSTANT] = 0
            return matrix
        if kind not in ("embed", "output"):
            raise KeyError(f"the synthetic model has no tensor {name!r}")
        matrix = self._random(name, (self.config.vocab_size, d), 1.0 if kind == "embed" else d**-0.5)
        matrix[:, :CONSTANT] = math.sqrt(d / CONSTANT) if kind == "embed" else 0
        return matrix

    def packed(self, name: str, *, transposed: bool = False) -> PackedRows | None:
        """Return the rows of a layer's neurons in q8_0, None for other tensors and for matrices by output."""
        kind = name.rsplit(".", 1)[-1]
        if transposed or self.packed_format(name) is None:
            return None
        layer, (neurons, d) = int(name.split(".")[1]), (self.config.num_neurons, self.config.d_model)
        codes = self._window(name, neurons * d).reshape(neurons, d // 32, 32).copy()
        scale = math.sqrt(2 / d) / _CODE_STD  # the FFN's input has a random part of half the variance
        if kind == "w_down":
            scale = _FFN_STD / math.sqrt(ACTIVE_FRAC * neurons) / _CODE_STD
            codes[:, 0, :CONSTANT] = 0
        elif kind == "w_gate":
            # The constant part of the input is sqrt(d / 2 / CONSTANT) in each of its columns.
            share = np.rint(self.biases[layer] * _CODE_STD / math.sqrt(CONSTANT))
            codes[:, 0, :CONSTANT] = share.clip(-127, 127)[:, None]
        data = np.empty((neurons, d // 32, 34), np.uint8)
        data[:, :, :2] = np.array([scale], np.float16).view(np.uint8)
        data[:, :, 2:] = codes.view(np.uint8)
        return PackedRows(data=data.reshape(neurons, -1), format="q8_0")

    def packed_format(self, name: str) -> str | None:
        """Return the format of what ``packed`` gives."""
        return "q8_0" if name.rsplit(".", 1)[-1] in ("w_gate", "w_up", "w_down") else None

    def check_packed(self, name: str) -> None:
        """Nothing can be wrong: the rows are made here."""

    def release(self) -> None:
        """Nothing was read."""

    def _random(self, name: str, shape: tuple[int, int], std: float) -> Float[np.ndarray, "rows columns"]:
        return self._window(name, shape[0] * shape[1]).reshape(shape).astype(np.float32) * (std / _CODE_STD)

    def _window(self, name: str, size: int) -> np.ndarray:
        """Return a window of the pool, another one for each name."""
        start = int(np.random.default_rng(list(name.encode())).integers(len(self._pool) - size))
        return self._pool[start : start + size]


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _quantile(p: float) -> float:
    """Return z with normal_cdf(z) = p, by halving."""
    low, high = -8.0, 8.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _normal_cdf(middle) < p else (low, middle)
    return low
