"""The architectures of GGUF files that are read: how each lays its weights out and what it computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GgufArch:
    """One architecture.

    Attributes:
        activation: what programs that read these files compute, unless the file says otherwise.
        threshold: of FATReLU.
        gated: the FFN has ``ffn_gate``.
        norm, positions, parallel_block: as in ``ModelConfig``.
        interleaved: rows 2i and 2i+1 of a head of q and k are a rotary pair (else i and i + H/2).
        fused: q, k and v are one tensor ``attn_qkv``: all rows of q, then of k, then of v.
        norm_eps: epsilon where the file names none; None: it must name one.

    Source: llama.cpp's graphs and ``llama_model_rope_type``; for ``opt``, ``bamboo``, ``prosparse-llama``,
        ``relu-falcon`` and ``sparse-qwen2`` those of its forks PowerInfer and kairox.cpp.
    """

    activation: str
    threshold: float = 0.0
    gated: bool = True
    norm: str = "rmsnorm"
    positions: str = "rotary"
    parallel_block: bool = False
    interleaved: bool = False
    fused: bool = False
    norm_eps: float | None = None

    @property
    def norm_eps_key(self) -> str:
        """The metadata key of ``norm_eps``, after the architecture's name."""
        return (
            "attention.layer_norm_rms_epsilon" if self.norm == "rmsnorm" else "attention.layer_norm_epsilon"
        )


def _falcon(activation: str) -> GgufArch:
    return GgufArch(activation=activation, gated=False, norm="layernorm", parallel_block=True, fused=True)


ARCHITECTURES = {
    "llama": GgufArch(activation="silu", interleaved=True),
    "prosparse-llama": GgufArch(activation="fatrelu", threshold=0.01, interleaved=True),
    "bamboo": GgufArch(activation="drelu", interleaved=True),
    "qwen2": GgufArch(activation="silu"),
    "sparse-qwen2": GgufArch(activation="drelu"),
    "opt": GgufArch(activation="relu", gated=False, norm="layernorm", positions="learned", norm_eps=1e-5),
    "falcon": _falcon("gelu"),
    "relu-falcon": _falcon("relu"),
}
