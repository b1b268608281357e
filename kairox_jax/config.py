"""Frozen, validated settings: facts of a checkpoint, placement of neurons, and generation.

Nothing here reads a file, a clock or the environment. Every field is read somewhere and a test shows it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

ACTIVATIONS = ("silu", "relu", "relu2", "fatrelu", "drelu")
NORMS = ("rmsnorm", "layernorm")
POSITIONS = ("rotary", "learned")
ROPE_SCALINGS = ("linear", "llama3", "factors")
SLOT_FORMATS = ("auto", "packed", "float32")
MODES = ("dense", "exact", "predicted")
HOST_CALLBACKS = ("split", "pure", "buffer", "ffi")
HOST_ACTIVATIONS = ("float32", "int8")
MAX_PENALTY, MAX_BIAS, MAX_LOGPROBS = 2, 100, 20  # as OpenAI's API has them
MAX_PARALLEL = 8  # sequences of a step: what the host's kernels take
LEAST_CONTEXT = 2  # positions of a sequence: a token of the prompt and one of the answer

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"([0-9]+\.?[0-9]*(?:e[0-9]+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_DURATION = re.compile(r"([0-9]+\.?[0-9]*)\s*(us|ms|s)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MAX_LATENCY_S = 10.0


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
    size = float(match[1]) * {**_UNITS, **_BINARY_UNITS}[unit]
    if not math.isfinite(size):
        raise ValueError(f"size {text!r} is beyond any memory: give a number of bytes such as 6GB")
    num_bytes = int(size)
    if num_bytes <= 0:
        raise ValueError(f"size {text!r} is zero: give a positive number of bytes, such as 6GB")
    return num_bytes


def parse_link(text: str) -> tuple[float, float]:
    """Parse a link such as ``3.3GB/s,20us``, or ``800MB/s`` without a latency.

    Args:
        text: bandwidth (as ``parse_bytes`` takes sizes, with ``/s``), and a latency in us, ms or s after a comma.

    Returns:
        Bytes a second and seconds of latency.

    Raises:
        ValueError: the text is no link.
    """
    bandwidth, _, latency = str(text).partition(",")
    size = re.fullmatch(r"(.+)/s", bandwidth.strip(), re.IGNORECASE)
    delay = _DURATION.fullmatch(latency.strip()) if latency else None
    if size is None or (delay is None and "," in str(text)):
        raise ValueError(f"link {text!r}: expected bandwidth and latency such as 3.3GB/s,20us")
    seconds = 0.0 if delay is None else float(delay[1]) * _SECONDS[delay[2]]
    if seconds > MAX_LATENCY_S:
        raise ValueError(f"link {text!r}: a latency above {MAX_LATENCY_S:g} s is no link; give us or ms")
    return float(parse_bytes(size[1])), seconds


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those first trained on.

    Attributes:
        kind: ``linear`` divides every frequency by ``factor``; ``llama3`` divides those whose wavelength is
            longer than ``original_context / low_freq_factor``, keeps those shorter than
            ``original_context / high_freq_factor``, and blends between the two; ``factors`` divides
            frequency i by ``factors[i]`` and by ``factor``.
        factor: how many times longer the context becomes.
        low_freq_factor, high_freq_factor: the blend's ends, for ``llama3``.
        original_context: positions that the model was first trained on, for ``llama3``.
        factors: one divisor for each of the H / 2 frequencies, for ``factors``; empty elsewhere.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ROPE_SCALINGS:
            raise ValueError(f"rotary scaling {self.kind!r} is not one of {', '.join(ROPE_SCALINGS)}")
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"rotary scaling factor {self.factor} must be positive")
        if not 0 < self.low_freq_factor < self.high_freq_factor < np.inf:
            raise ValueError(
                f"rotary scaling: low_freq_factor {self.low_freq_factor} must be positive and below "
                f"high_freq_factor {self.high_freq_factor}"
            )
        if self.original_context <= 0:
            raise ValueError(f"rotary scaling: original_context {self.original_context} must be above zero")
        if (self.kind == "factors") != bool(self.factors):
            raise ValueError(
                f"rotary scaling {self.kind!r} with {len(self.factors)} factors: 'factors' needs them, no other"
            )
        if not all(math.isfinite(factor) and factor > 0 for factor in self.factors):
            raise ValueError("rotary scaling: every one of factors must be finite and positive")

    def scale(self, inv_freq: Float[np.ndarray, " half"]) -> Float[np.ndarray, " half"]:
        """Stretch rotary frequencies.

        Args:
            inv_freq: ``rope_theta ** (-2 i / H)`` for i in [0, H / 2), in radians a position, float64.

        Returns:
            The frequencies to use, float64.

        Raises:
            ValueError: ``factors`` are more or fewer than the frequencies.

        Source: transformers, ``_compute_linear_scaling_rope_parameters``, ``_compute_llama3_parameters``.
        """
        if self.kind == "linear":
            return inv_freq / self.factor
        if self.kind == "factors":
            if len(self.factors) != len(inv_freq):
                raise ValueError(
                    f"rotary scaling: {len(self.factors)} factors for {len(inv_freq)} frequencies: give one each"
                )
            return inv_freq / np.array(self.factors) / self.factor
        # 0: long wavelength, fully stretched; 1: short wavelength, kept.
        turns = self.original_context * inv_freq / (2 * np.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return (1 - keep) * inv_freq / self.factor + keep * inv_freq


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Facts of a checkpoint; axis letters as in docs/architecture.md.

    Attributes:
        family: the checkpoint's name for its architecture; readers find the weights by it, and what is
            computed is said by the fields below alone.
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
        norm: ``rmsnorm`` is x / sqrt(mean(x^2) + eps) * w; ``layernorm`` is (x - mean(x)) /
            sqrt(var(x) + eps) * w + b with the biased variance, and each norm then has a ``*_norm_bias``.
        positions: ``rotary`` turns q and k (half-split pairs i and i + H/2 over the whole head);
            ``learned`` adds ``pos_embed[position]`` to the embedding and turns nothing.
        rope_theta: base of the rotary frequencies.
        rope_scaling: stretching of the rotary frequencies, or None.
        sliding_window: a query at position p sees keys in (p - window, p], in every layer; None: all up to p.
        parallel_block: the block is x + attn(attn_norm(x)) + ffn(ffn_norm(x)), both norms of the same x
            (``ffn_norm`` may be the same tensor as ``attn_norm``); else h = x + attn(attn_norm(x)), then
            h + ffn(ffn_norm(h)).
        gated: the FFN is down(act(gate x) * (up x)), for ``drelu`` down(relu(gate x) * relu(up x)); not
            gated, it is down(act(up x + b_up)) + b_down and there is no ``w_gate``.
        qkv_bias: ``bq``, ``bk``, ``bv`` are added to q, k and v, before any rotation.
        out_bias: ``bo`` is added after ``wo``.
        ffn_bias: ``b_up`` and ``b_down`` exist; only where the FFN is not gated.
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
    norm: str = "rmsnorm"
    positions: str = "rotary"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    parallel_block: bool = False
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
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
            if value >= 2**31:
                raise ValueError(f"{name} is {value!r:.40}: beyond any model, the checkpoint is damaged")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}: "
                "the checkpoint's head counts are wrong"
            )
        if self.norm not in NORMS:
            raise ValueError(f"norm {self.norm!r} is not one of {', '.join(NORMS)}")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions {self.positions!r} is not one of {', '.join(POSITIONS)}")
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary positions need pairs")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.activation == "drelu" and not self.gated:
            raise ValueError("activation 'drelu' needs a gated FFN")
        if self.ffn_bias and self.gated:
            raise ValueError("ffn_bias: biases of a gated FFN are not supported")
        if self.sliding_window is not None and self.sliding_window <= 0:
            raise ValueError(f"sliding_window {self.sliding_window} must be above zero, or None")
        if not math.isfinite(self.activation_threshold) or self.activation_threshold < 0:
            raise ValueError(
                f"activation_threshold {self.activation_threshold} must be finite and not negative"
            )
        if not self.norm_eps > 0:
            raise ValueError(f"norm_eps {self.norm_eps} must be positive")
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta {self.rope_theta} must be positive")


# Of PlacementConfig: what only the policy guide reads.
GUIDE_SETTINGS = ("tam_beta", "tam_threshold", "tam_evict", "anb_enable")


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Where neurons live and which policy moves them.

    Attributes:
        vram_budget_bytes: bytes of device memory for everything, or None for no limit.
        gpu_cache_neurons: slots per layer, or None to take what the budget leaves; without budget and accelerator none.
        slot_format: what a device slot holds: ``packed`` the file's own blocks, ``float32`` unpacked weights;
            ``auto`` is packed on accelerators, float32 on XLA's CPU backend.
        policy: a key of ``kairox_jax.balancing.POLICIES``; ``auto`` is split, or guide where one of guide's settings,
            the four that follow, is not its default.
        tam_beta: momentum kept per step, in [0, 1).
        tam_threshold: momentum from which a neuron is promoted, in (0, 1].
        tam_evict: momentum under which a resident is evicted, in [0, tam_threshold].
        anb_enable: let measured times move the promotion threshold.
        max_moves: the most promotions in flight for one layer and step; the size of a staging buffer.
        emulated_link: hold promotions to a bandwidth and latency, as ``parse_link`` takes them; None: as they come.
        host_callback: how the host's part is called: "split" by Python between small programs; "pure", "buffer"
            or "ffi" from inside one program a layer.
        host_activations: what the host's kernels multiply packed rows with: "float32" inputs as they are, or "int8",
            rounded with a scale for each few of them. Down columns take floats in both.
    """

    vram_budget_bytes: int | None = None
    gpu_cache_neurons: int | None = None
    slot_format: str = "auto"
    policy: str = "auto"
    tam_beta: float = 0.90
    tam_threshold: float = 0.35
    tam_evict: float = 0.08
    anb_enable: bool = True
    max_moves: int = 64
    emulated_link: str | None = None
    host_callback: str = "split"
    host_activations: str = "float32"

    def __post_init__(self) -> None:
        if self.vram_budget_bytes is not None and self.vram_budget_bytes <= 0:
            raise ValueError(f"--vram-budget {self.vram_budget_bytes} must be above zero")
        if self.gpu_cache_neurons is not None and self.gpu_cache_neurons < 0:
            raise ValueError(f"--gpu-cache-neurons {self.gpu_cache_neurons} must not be negative")
        if self.slot_format not in SLOT_FORMATS:
            raise ValueError(f"slot_format {self.slot_format!r} is not one of {', '.join(SLOT_FORMATS)}")
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
        if self.emulated_link is not None:
            parse_link(self.emulated_link)
        if self.host_callback not in HOST_CALLBACKS:
            raise ValueError(
                f"--host-callback {self.host_callback} is not one of {', '.join(HOST_CALLBACKS)}"
            )
        if self.host_activations not in HOST_ACTIVATIONS:
            raise ValueError(
                f"--host-activations {self.host_activations} is not one of {', '.join(HOST_ACTIVATIONS)}"
            )
        if self.host_activations != "float32" and self.host_callback != "split":
            raise ValueError(
                f"--host-activations {self.host_activations} needs --host-callback split, not {self.host_callback}"
            )

    @property
    def policy_name(self) -> str:
        """The policy, ``auto`` resolved."""
        if self.policy != "auto":
            return self.policy
        changed = any(getattr(self, name) != getattr(type(self), name) for name in GUIDE_SETTINGS)
        return "guide" if changed else "split"


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How tokens are chosen and when to stop.

    Attributes:
        max_tokens: the most new tokens.
        temperature: 0 takes the most probable token.
        top_k: keep the k most probable; 0 keeps all.
        top_p: keep the smallest set whose probability reaches p, in (0, 1].
        min_p: keep tokens of at least this share of the best one's probability, in [0, 1].
        presence_penalty: taken off the logit of each token that was generated before, in [-2, 2].
        frequency_penalty: taken off as many times as the token was generated before, in [-2, 2].
        logit_bias: added to the logits of these token ids, each in [-100, 100]; -100 all but bans a token.
        logprobs: log-probabilities of each token and of this many most probable ones; None gives none. They
            are the model's own: before penalties, bias, temperature and filters.
        seed: of the sampler; the same seed gives the same tokens.
        stop: texts at which generation ends; they are not part of the result.
        ignore_eos: go on after an end-of-sequence token.
    """

    max_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens {self.max_tokens} must not be negative")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature {self.temperature} must be 0 or more")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} must be in (0, 1]; 1 turns it off")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p {self.min_p} must be in [0, 1]; 0 turns it off")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -MAX_PENALTY <= (value := getattr(self, name)) <= MAX_PENALTY:
                raise ValueError(f"{name} {value} must be in [-{MAX_PENALTY}, {MAX_PENALTY}]; 0 turns it off")
        for token_id, bias in self.logit_bias.items():
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise ValueError(
                    f"logit_bias of token {token_id} is {bias}: it must be in [-{MAX_BIAS}, {MAX_BIAS}]"
                )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs {self.logprobs} must be from 0 to {MAX_LOGPROBS}, or None for none")
        if self.seed < 0:
            raise ValueError(f"seed {self.seed} must not be negative")
        if isinstance(self.stop, str) or any(not text for text in self.stop):
            raise ValueError("stop must be a sequence of texts, none of them empty")
