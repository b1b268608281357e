"""A tiny SiLU model with byte tokens, and a source of its weights."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kairox_jax.config import ModelConfig
from kairox_jax.models import Decoder
from training.texts import Windows

CONFIG = ModelConfig(
    family="llama",
    num_layers=3,
    d_model=16,
    num_neurons=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=128,
    context_length=64,
    activation="silu",
    tie_embeddings=True,
)


class TinySource:
    """What `open_checkpoint` returns, as far as training needs it; weights are drawn by name."""

    def __init__(self, **changes: object) -> None:
        self.config = dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
        self.broken = False

    def tensor(self, name: str) -> np.ndarray:
        c = self.config
        heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        shapes = {"embed": (c.vocab_size, c.d_model), "wq": (heads, c.d_model), "wo": (c.d_model, heads)}
        shapes |= {name: (kv_heads, c.d_model) for name in ("wk", "wv")}
        shapes |= {name: (c.num_neurons, c.d_model) for name in ("w_gate", "w_up", "w_down")}
        short = name.rpartition(".")[2]
        rng = np.random.default_rng(list(name.encode()))
        if short.endswith("norm"):
            return rng.uniform(0.5, 1.5, c.d_model).astype(np.float32)
        values = rng.normal(size=shapes[short]) * (1.0 if short == "embed" else 0.3)
        return (values * (np.nan if self.broken else 1)).astype(np.float32)

    def packed(self, name: str) -> None:
        return None

    def own_sparsity(self) -> None:
        return None

    def has(self, name: str) -> bool:
        return False

    def tokenizer(self) -> "TinySource":
        return self

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        assert add_bos is False
        return list(text.encode("ascii", "replace"))


@pytest.fixture
def source() -> TinySource:
    return TinySource()


@pytest.fixture
def decoder() -> Decoder:
    """A decoder with weights large enough that thresholds matter."""
    decoder = Decoder(CONFIG, rngs=nnx.Rngs(1))
    return nnx.merge(*[part if i == 0 else _scaled(part) for i, part in enumerate(nnx.split(decoder))])


def _scaled(state: nnx.State) -> nnx.State:
    import jax

    return jax.tree.map(lambda a: a * 15 if a.ndim == 2 else a * jnp.float32(1.1), state)


@pytest.fixture
def windows() -> Windows:
    """Five windows of 12 tokens: two of prose, three of JSON."""
    ids = np.random.default_rng(5).integers(0, CONFIG.vocab_size, (5, 12)).astype(np.int32)
    return Windows(ids, ("prose",) * 2 + ("json",) * 3, ())
