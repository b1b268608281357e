"""Activation rules: from the gate and up products of a neuron to its value, and which neurons are active.

Shared by the XLA and Pallas forms (plain jnp, so that it traces in both); the references have their own.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp

Rule = Literal["silu", "relu", "relu2", "fatrelu", "drelu"]
RULES: tuple[str, ...] = get_args(Rule)
THRESHOLD_RULES = ("silu", "fatrelu")
# "silu" is continuous: from the threshold t on, z counts with min(|z|, RAMP_SLOPE (|z| - t)), whole from 1.5 t on.
RAMP_SLOPE = 3.0


def check_rule(rule: str, *, gated: bool, threshold: object) -> None:
    """Raise where a rule is unknown or its operands do not fit it.

    Args:
        rule: one of ``RULES``.
        gated: whether the neurons have a gate row.
        threshold: None or 0.0 for rules without one, else a number or a scalar array.

    Raises:
        ValueError: unknown rule, ``drelu`` without gate, threshold missing or superfluous.
    """
    if rule not in RULES:
        raise ValueError(f"rule {rule!r} is unknown: use one of {', '.join(RULES)}")
    if rule == "drelu" and not gated:
        raise ValueError("rule 'drelu' needs gate rows, got gate=None: use 'relu' for an ungated model")
    if rule in THRESHOLD_RULES and threshold is None:
        raise ValueError(f"rule {rule!r} needs a threshold, got None: pass 0.0 to keep every non-zero value")
    if rule not in THRESHOLD_RULES and not (
        threshold is None or isinstance(threshold, float | int) and not threshold
    ):
        raise ValueError(f"rule {rule!r} has no threshold, got {threshold!r}: pass None, or use 'fatrelu'")


def first_is_active(rule: str, first: jax.Array, threshold: jax.Array) -> jax.Array | None:
    """Say which neurons can be active once the first product is known (the gate's, or the up's if ungated).

    Returns:
        Booleans of ``first``'s shape; None where the first product decides nothing ("silu").
    """
    if rule == "silu":
        return None
    return first > (threshold if rule == "fatrelu" else 0.0)


def rule_value(rule: str, gate: jax.Array | None, up: jax.Array, threshold: jax.Array) -> jax.Array:
    """Return the value z of each neuron, 0 where it is inactive.

    Args:
        rule: one of ``RULES``.
        gate: gate products (float32), or None for an ungated model.
        up: up products, same shape.
        threshold: scalar float32; read by "silu" (|z| > threshold, in part up to 1.5 of it) and "fatrelu"
            (first product > threshold).
    """
    first = up if gate is None else gate
    if rule == "silu":
        value = first * jax.nn.sigmoid(first)
        value = value if gate is None else value * up
        size = jnp.abs(value)
        part = jnp.minimum(size, RAMP_SLOPE * (size - threshold))
        return jnp.where(size > threshold, jnp.where(value < 0, -part, part), 0.0)
    value = first * first if rule == "relu2" else first
    if gate is not None:
        value = value * (jnp.maximum(up, 0.0) if rule == "drelu" else up)
    return jnp.where(first > (threshold if rule == "fatrelu" else 0.0), value, 0.0)
