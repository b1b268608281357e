"""What the server says of itself: model, placement, memory, limits."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kairox_jax.engine import Engine
from kairox_jax.server.settings import ServerSettings


def model_record(settings: ServerSettings, created: int) -> dict[str, Any]:
    """Return the model as an entry of /v1/models."""
    return {"id": settings.model_name, "object": "model", "created": created, "owned_by": "kairox"}


def props(settings: ServerSettings, engine: Engine) -> dict[str, Any]:
    """Return the actual placement and settings."""
    config, defaults = engine.config, settings.defaults
    return {
        "version": _version(),
        "model": settings.model_name,
        "family": config.family,
        "activation": config.activation,
        "num_layers": config.num_layers,
        "num_neurons": config.num_neurons,
        "vocab_size": config.vocab_size,
        "context_length": engine.context_length,
        "chat": bool(engine.chat_template),
        "device": f"{engine.device.platform}:{engine.device.device_kind}",
        "mode": engine.mode,
        "policy": engine.policy_name,
        "description": engine.describe(),
        "placement": engine.placement(),
        "budget": engine.plan.to_json(),
        "parallel": engine.parallel,
        "defaults": {
            "temperature": defaults.temperature,
            "top_k": defaults.top_k,
            "top_p": defaults.top_p,
            "min_p": defaults.min_p,
            "seed": settings.seed,
        },
        "limits": {
            "max_waiting": settings.max_waiting,
            "max_body_bytes": settings.max_body_bytes,
            "timeout_s": settings.timeout_s,
        },
    }


def _version() -> str:
    try:
        return version("kairox-jax")
    except PackageNotFoundError:
        return "source tree"
