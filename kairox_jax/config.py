"""Frozen, validated settings: facts of a checkpoint, placement of neurons, and generation.

Nothing here reads a file, a clock or the environment. Every field is read somewhere and a test shows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

ACTIVATIONS = ("silu", "relu", "relu2", "fatrelu", "drelu")
MODES = ("dense", "exact")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"([0-9]+\.?[0-9]*(?:e[0-9]+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def parse_bytes(text: str | int | float) -> int:
    """Parse a size such as ``6 GB``, ``6GiB``, ``512m`` or ``6e9``.

    Args:
        text: number of bytes, or a number with an optional unit (decimal k, M, G, T; binary Ki, Mi, Gi, Ti).

    Returns:
        The number of bytes, more than zero.

    Raises:
        ValueError: the text is not a size, or is zero or negative.
    """
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"size {text!r}: expected a positive number with a unit, such as 6GB, 6GiB or 6e9")
    unit = (match[2] or "").lower()
    num_bytes = int(float(match[1]) * {**_UNITS, **_BINARY_UNITS}[unit])
    if num_bytes <= 0:
        raise ValueError(f"size {text!r} is zero: give a positive number of bytes, such as 6GB")
    return num_bytes


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Facts of a checkpoint; axis letters as in docs/architecture.md.

    Attributes:
        family: key of ``kairox_jax.models.FAMILIES``.
        num_layers: L.
        d_model: D, width of the residual stream.
        num_neurons: F, hidden units of each FFN.
        num_heads: N, query heads.
        num_kv_heads: K, key and value heads; divides N.
        head_dim: H.
        vocab_size: V.
        context_length: the most positions that the model was made for.
        activation: one of ``ACTIVATIONS``.
        activation_threshold: FATReLU's threshold; a gate counts where it is larger. 0 elsewhere.
        norm_eps: epsilon of every normalisation.
        rope_theta: base of the rotary frequencies.
        tie_embeddings: the output matrix is the embedding.
        bos_id, eos_ids: special tokens, where the checkpoint names them.
        add_bos: the tokenizer puts ``bos_id`` before a prompt.
    """

    family: str
    num_layers: int
    d_model: int
    num_neurons: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    activation: str
    activation_threshold: float = 0.0
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "d_model",
            "num_neurons",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "context_length",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise ValueError(f"{name} is {value!r}: the checkpoint must give a whole number above zero")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}: "
                "the checkpoint's head counts are wrong"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary positions need pairs")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if not np.isfinite(self.activation_threshold) or self.activation_threshold < 0:
            raise ValueError(
                f"activation_threshold {self.activation_threshold} must be finite and not negative"
            )
        if not self.norm_eps > 0:
            raise ValueError(f"norm_eps {self.norm_eps} must be positive")
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta {self.rope_theta} must be positive")


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Where neurons live and which policy moves them.

    Attributes:
        vram_budget_bytes: bytes of device memory for everything, or None for no limit.
        gpu_cache_neurons: slots per layer, or None to take what the budget leaves.
        policy: a key of ``kairox_jax.balancing.POLICIES``.
        tam_beta: momentum kept per step, in [0, 1).
        tam_threshold: momentum from which a neuron is promoted, in (0, 1].
        tam_evict: momentum under which a resident is evicted, in [0, tam_threshold].
        anb_enable: let measured times move the promotion threshold.
        max_moves: the most promotions in flight for one layer and step; the size of a staging buffer.
    """

    vram_budget_bytes: int | None = None
    gpu_cache_neurons: int | None = None
    policy: str = "guide"
    tam_beta: float = 0.90
    tam_threshold: float = 0.35
    tam_evict: float = 0.08
    anb_enable: bool = True
    max_moves: int = 64

    def __post_init__(self) -> None:
        if self.vram_budget_bytes is not None and self.vram_budget_bytes <= 0:
            raise ValueError(f"--vram-budget {self.vram_budget_bytes} must be above zero")
        if self.gpu_cache_neurons is not None and self.gpu_cache_neurons < 0:
            raise ValueError(f"--gpu-cache-neurons {self.gpu_cache_neurons} must not be negative")
        if not 0 <= self.tam_beta < 1:
            raise ValueError(f"--tam-beta {self.tam_beta} must be in [0, 1)")
        if not 0 < self.tam_threshold <= 1:
            raise ValueError(f"--tam-threshold {self.tam_threshold} must be in (0, 1]")
        if not 0 <= self.tam_evict <= self.tam_threshold:
            raise ValueError(
                f"--tam-evict {self.tam_evict} must be in [0, --tam-threshold {self.tam_threshold}]"
            )
        if self.max_moves <= 0:
            raise ValueError(f"max_moves {self.max_moves} must be above zero")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How tokens are chosen and when to stop.

    Attributes:
        max_tokens: the most new tokens.
        temperature: 0 takes the most probable token.
        top_k: keep the k most probable; 0 keeps all.
        top_p: keep the smallest set whose probability reaches p, in (0, 1].
        min_p: keep tokens of at least this share of the best one's probability, in [0, 1].
        seed: of the sampler; the same seed gives the same tokens.
        stop: texts at which generation ends; they are not part of the result.
        ignore_eos: go on after an end-of-sequence token.
    """

    max_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens {self.max_tokens} must not be negative")
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature {self.temperature} must be 0 or more")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} must be in (0, 1]; 1 turns it off")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p {self.min_p} must be in [0, 1]; 0 turns it off")
        if self.seed < 0:
            raise ValueError(f"seed {self.seed} must not be negative")
        if isinstance(self.stop, str) or any(not text for text in self.stop):
            raise ValueError("stop must be a sequence of texts, none of them empty")
