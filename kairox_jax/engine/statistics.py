"""Counts and times of one generation: what ran where, what moved, how fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kairox_jax.engine.hybrid import StepCounts
from kairox_jax.engine.migrate import MoveCounts


@dataclass(kw_only=True)
class Statistics:
    """What one generation did. Nothing is estimated.

    Attributes:
        device: platform and kind of the JAX device.
        mode, policy: as chosen; ``dense`` has no policy.
        budget: bytes of each part, from the plan.
        prompt_tokens, generated_tokens: counts.
        reused_tokens: of the prompt, those that were in the cache already.
        prefill_s, decode_s: seconds spent; ``decode_steps`` steps were run in the latter.
        beside_prompts: tokens that were decoded in the pieces of others' prompts, also in ``decode_s``. Their neurons
            and times are not counted below.
        hits, residual: active neurons computed on the device and on the host, all layers and steps.
        predicted: neurons that were forecast, all layers and steps; None outside ``predicted`` mode.
        all_neurons: neurons of all layers, for the share of those.
        resident: neurons with a record on the device at the end, all layers.
        promotions, evictions, wasted_promotions: moves; wasted are promotions that were evicted unused.
        link_bytes: bytes of promoted records.
        placement: what runs where.
        gpu_ms, io_ms, cpu_ms: device, link and host time, all steps.
    """

    device: str
    mode: str
    policy: str | None
    budget: dict[str, Any]
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_steps: int = 0
    beside_prompts: int = 0
    hits: int = 0
    residual: int = 0
    predicted: float | None = None
    all_neurons: int = 0
    resident: int = 0
    promotions: int = 0
    evictions: int = 0
    wasted_promotions: int = 0
    link_bytes: int = 0
    gpu_ms: float = 0.0
    io_ms: float = 0.0
    cpu_ms: float = 0.0
    placement: dict[str, Any] = field(default_factory=dict)

    def add_step(self, counts: StepCounts) -> None:
        """Add what one decode step did."""
        self.hits += int(counts.hits.sum())
        self.residual += int(counts.residual.sum())
        if counts.predicted is not None:
            self.predicted = (self.predicted or 0.0) + counts.predicted
            self.all_neurons = counts.active.size
        self.add_moves(counts.moves)
        self.gpu_ms += counts.times.gpu_ms
        self.cpu_ms += counts.times.cpu_ms

    def add_moves(self, moves: MoveCounts) -> None:
        """Add what moved."""
        self.promotions += moves.promotions
        self.evictions += moves.evictions
        self.wasted_promotions += moves.wasted_promotions
        self.link_bytes += moves.link_bytes
        self.io_ms += moves.io_ms

    @property
    def hit_rate(self) -> float | None:
        """Share of active neurons computed on the device, or None where nothing was counted."""
        active = self.hits + self.residual
        return self.hits / active if active else None

    @property
    def predicted_frac(self) -> float | None:
        """Share of all neurons that were forecast, and so computed; None outside ``predicted`` mode."""
        if self.predicted is None:
            return None
        return self.predicted / (self.all_neurons * max(self.decode_steps, 1))

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Decoded tokens per second after the first, or None where there was none."""
        decoded = self.decode_steps + self.beside_prompts
        return decoded / self.decode_s if decoded else None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Computed prompt tokens per second, or None where there was no prompt."""
        return (self.prompt_tokens - self.reused_tokens) / self.prefill_s if self.prefill_s else None

    def to_json(self) -> dict[str, Any]:
        """Return the statistics record; times in ms are means over the decode steps."""
        steps = max(self.decode_steps, 1)
        record: dict[str, Any] = {
            "device": self.device,
            "mode": self.mode,
            "policy": self.policy,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "generated_tokens": self.generated_tokens,
            "decoded_beside_prompts": self.beside_prompts,
            "prefill_tokens_per_s": _rounded(self.prefill_tokens_per_s),
            "decode_tokens_per_s": _rounded(self.decode_tokens_per_s),
            "hit_rate": _rounded(self.hit_rate, 6),
            "predicted_frac": _rounded(self.predicted_frac, 6),
            "predictor_recall": None,  # what was missed is not computed: `kairox eval` measures it
            "active": self.hits + self.residual,
            "hits": self.hits,
            "residual": self.residual,
            "resident": self.resident,
            "promotions": self.promotions,
            "evictions": self.evictions,
            "wasted_promotions": self.wasted_promotions,
            "link_bytes": self.link_bytes,
            "t_gpu_ms": round(self.gpu_ms / steps, 4),
            "t_io_ms": round(self.io_ms / steps, 4),
            "t_cpu_ms": round(self.cpu_ms / steps, 4),
            "budget": self.budget,
            "placement": self.placement,
        }
        return record

    def line(self) -> str:
        """Return one line for a person."""
        parts = [
            f"prompt {self.prompt_tokens} tokens at {_speed(self.prefill_tokens_per_s)}",
            f"generated {self.generated_tokens} at {_speed(self.decode_tokens_per_s)}",
        ]
        if self.predicted_frac is not None:
            parts.append(f"forecast {100 * self.predicted_frac:.1f} % of the neurons")
        if self.hit_rate is not None:
            gpu, io, cpu = (ms / max(self.decode_steps, 1) for ms in (self.gpu_ms, self.io_ms, self.cpu_ms))
            on_device = 100 * self.hit_rate
            if not self.resident and not self.evictions:
                parts.append("active neurons: all on the host")
                parts.append(f"ms a token: attention {gpu:.1f}, FFN {cpu:.1f}")
                return " | ".join(parts)
            parts.append(
                f"active neurons: {on_device:.1f} % on the device, {100 - on_device:.1f} % on the host"
            )
            parts.append(f"moved {self.promotions} in, {self.evictions} out ({self.link_bytes / 1e6:.1f} MB)")
            parts.append(f"ms a token: device {gpu:.1f}, link {io:.1f}, host {cpu:.1f}")
        return " | ".join(parts)


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else float(np.round(value, digits))


def _speed(tokens_per_s: float | None) -> str:
    return "-" if tokens_per_s is None else f"{tokens_per_s:.1f} tokens/s"
