"""Shapes of models at whose scale a trace can be replayed. Sources: the checkpoints' own config files."""

from __future__ import annotations

from dataclasses import dataclass, replace

DTYPE_BYTES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What the costs of a layer follow from.

    Attributes:
        num_layers: L.
        d_model: D.
        num_neurons: F.
        kv_dim: width of keys (and of values).
        vocab_size: V.
        num_matrices: rows of a record: 3 with a gate, 2 without.
        dtype: key of ``DTYPE_BYTES``, of all weights.
    """

    num_layers: int
    d_model: int
    num_neurons: int
    kv_dim: int
    vocab_size: int
    num_matrices: int = 3
    dtype: str = "f16"

    @property
    def record_bytes(self) -> float:
        """Bytes of one neuron's record."""
        return self.num_matrices * self.d_model * DTYPE_BYTES[self.dtype]

    @property
    def attention_bytes(self) -> float:
        """Bytes of one layer's attention matrices."""
        return 2 * self.d_model * (self.d_model + self.kv_dim) * DTYPE_BYTES[self.dtype]

    @property
    def head_bytes(self) -> float:
        """Bytes of the output matrix."""
        return self.vocab_size * self.d_model * DTYPE_BYTES[self.dtype]

    def kv_bytes(self, context: int) -> float:
        """Bytes of keys and values (float16) that one layer reads at that context length."""
        return 2 * context * self.kv_dim * 2.0


def _spec(layers: int, d: int, f: int, kv: int, vocab: int, matrices: int = 3) -> ModelSpec:
    return ModelSpec(
        num_layers=layers, d_model=d, num_neurons=f, kv_dim=kv, vocab_size=vocab, num_matrices=matrices
    )


MODELS: dict[str, ModelSpec] = {
    "smollm2-135m": _spec(30, 576, 1536, 192, 49152),
    "llama-7b": _spec(32, 4096, 11008, 4096, 32000),
    "llama-13b": _spec(40, 5120, 13824, 5120, 32000),
    "llama-70b": _spec(80, 8192, 28672, 1024, 32000),
    "opt-6.7b": _spec(32, 4096, 16384, 4096, 50272, 2),
    "opt-30b": _spec(48, 7168, 28672, 7168, 50272, 2),
    "falcon-40b": _spec(60, 8192, 32768, 1024, 65024, 2),
}


def find_model(name: str, dtype: str = "f16") -> ModelSpec:
    """Return the model of that name with weights of ``dtype``.

    Raises:
        ValueError: no such model.
    """
    if name not in MODELS:
        raise ValueError(f"model {name!r} is unknown: choose one of {', '.join(sorted(MODELS))}")
    return replace(MODELS[name], dtype=dtype)
