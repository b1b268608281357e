"""Activation rules: the value z of each neuron, and whether it counts for the token.

One rule serves the dense model, the device kernels' reference and the thresholds' training.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kairox_jax.config import ACTIVATIONS

# A SiLU value over its threshold t counts in part: its magnitude rises from 0 at t to itself at 1.5 t. As a step, a
# neuron within rounding of t counted in one placement and not in another, and moved logits by 0.9; a steep ramp (17)
# amplifies rounding from layer to layer (0.15); this one stays at 3e-4.
RAMP_SLOPE = 3.0


def over_threshold(
    z: Float[Array, "*batch F"], threshold: float | Float[Array, ""]
) -> tuple[Float[Array, "*batch F"], Bool[Array, "*batch F"]]:
    """Return what a threshold leaves of SiLU neurons' values [..., F], and where anything is left (active)."""
    excess = jnp.abs(z) - threshold
    active = excess > 0
    left = jnp.sign(z) * jnp.minimum(jnp.abs(z), RAMP_SLOPE * excess)
    return jnp.where(active, left, 0), active


def neuron_values(
    gate: Float[Array, "*batch F"] | None,
    up: Float[Array, "*batch F"],
    activation: str,
    threshold: float | Float[Array, ""] | None,
) -> tuple[Float[Array, "*batch F"], Bool[Array, "*batch F"]]:
    """Apply an activation rule.

    Args:
        gate: gate products [..., F], or None for an FFN without a gate (the rule then reads ``up``).
        up: up products [..., F].
        activation: one of ``config.ACTIVATIONS``.
        threshold: FATReLU's threshold, or what |silu(g) u| must exceed to count (in part up to 1.5 times it:
            min(|z|, 3 (|z| - threshold))); None computes SiLU densely, and FATReLU as ReLU. ReLU, ReLU squared
            and dReLU do not read it.

    Returns:
        z [..., F], zero where the neuron is inactive, and the active mask [..., F].

    Raises:
        ValueError: a rule that does not exist, or dReLU without a gate.

    Source: FATReLU, ProSparse (arXiv 2402.13516) section 3; dReLU, TurboSparse (arXiv 2406.05955) section 3.
    """
    driver = up if gate is None else gate
    factor = 1.0 if gate is None else up
    if activation == "silu":
        z = jax.nn.silu(driver) * factor
        if threshold is None:
            return z, jnp.ones(z.shape, bool)
        return over_threshold(z, threshold)
    elif activation == "relu":
        active = driver > 0
        z = driver * factor
    elif activation == "relu2":
        active = driver > 0
        z = driver * driver * factor
    elif activation == "fatrelu":
        active = driver > (0.0 if threshold is None else threshold)
        z = driver * factor
    elif activation == "drelu":
        if gate is None:
            raise ValueError("activation 'drelu' needs a gated FFN")
        active = (gate > 0) & (up > 0)
        z = gate * up
    else:
        raise ValueError(f"activation {activation!r} is unknown: choose one of {', '.join(ACTIVATIONS)}")
    return jnp.where(active, z, 0), active
