"""``gather_gate_up`` in plain jnp float32, one formula a rule: what every implementation must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def gather_gate_up_reference(
    x: jax.Array,
    gate: jax.Array | None,
    up: jax.Array,
    slots: jax.Array,
    n: jax.Array,
    *,
    rule: str,
    threshold: float,
    gate_bias: jax.Array | None,
    up_bias: jax.Array | None,
) -> jax.Array:
    """Return float32 [B, K]: values of ``slots[:n]``, 0 elsewhere; no argument has a default.

    Args:
        x: [B, D].
        gate: [C, D] or None.
        up: [C, D].
        slots: int32 [K], all inside 0..C-1.
        n: int32 scalar.
        rule: "silu", "relu", "relu2", "fatrelu" or "drelu".
        threshold: see the rule; ignored by the others.
        gate_bias: [C] or None.
        up_bias: [C] or None.
    """
    x32 = x.astype(jnp.float32)

    def project(w, bias):
        out = jnp.einsum("bd,cd->bc", x32, w.astype(jnp.float32), precision="highest")
        return out if bias is None else out + jnp.broadcast_to(bias.astype(jnp.float32), out.shape)

    u = project(up, up_bias)
    g = u if gate is None else project(gate, gate_bias)
    other = jnp.ones_like(u) if gate is None else u
    if rule == "silu":
        z = g / (1.0 + jnp.exp(-g)) * other
        excess = jnp.clip(abs(z) - threshold, 0)
        z = jnp.sign(z) * jnp.minimum(abs(z), 3 * excess)
    elif rule == "relu":
        z = jax.nn.relu(g) * other
    elif rule == "relu2":
        z = jnp.square(jax.nn.relu(g)) * other
    elif rule == "fatrelu":
        z = g * (g > threshold) * other
    else:
        z = jax.nn.relu(g) * jax.nn.relu(u)
    listed = jnp.arange(slots.shape[0]) < n
    return jnp.take(z, slots, axis=1) * jnp.broadcast_to(listed, (x.shape[0], slots.shape[0]))
