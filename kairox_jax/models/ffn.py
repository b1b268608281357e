"""The feed-forward network, neuron by neuron: row i of each matrix belongs to neuron i."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from kairox_jax.config import ModelConfig
from kairox_jax.models.exact import THRESHOLDED
from kairox_jax.models.norm import normalise
from kairox_jax.models.rules import neuron_values


class Threshold(nnx.Variable):
    """A layer's activation threshold: kept with the state, not trained as a weight."""


class FFN(nnx.Module):
    """Pre-norm FFN: ``y = sum over active i of z_i w_down[i], plus b_down``; the caller adds the residual.

    Attributes:
        norm: [D] scale of the norm.
        norm_bias: [D], or None for an RMS norm.
        w_gate: [F, D], or None where the FFN is not gated.
        w_up, w_down: [F, D]; the down matrix is stored by neuron, as its records are.
        b_up, b_down: [F] and [D], or None.
        threshold: scalar in place of the config's; None for the config's, and the dense function of SiLU.

    Raises:
        ValueError: a threshold for an activation that has none.
    """

    def __init__(self, config: ModelConfig, *, threshold: float | None, rngs: nnx.Rngs) -> None:
        if threshold is not None and config.activation not in THRESHOLDED:
            raise ValueError(
                f"threshold {threshold}: activation {config.activation!r} takes none, its inactive "
                "neurons are exactly zero; leave it out"
            )
        self.config = config
        dim, neurons = config.d_model, config.num_neurons
        init = nnx.initializers.normal(0.02)
        self.norm = nnx.Param(jnp.ones((dim,), jnp.float32))
        self.norm_bias = nnx.Param(jnp.zeros((dim,), jnp.float32)) if config.norm == "layernorm" else None
        self.w_gate = nnx.Param(init(rngs.params(), (neurons, dim))) if config.gated else None
        self.w_up = nnx.Param(init(rngs.params(), (neurons, dim)))
        self.w_down = nnx.Param(init(rngs.params(), (neurons, dim)))
        self.b_up = nnx.Param(jnp.zeros((neurons,), jnp.float32)) if config.ffn_bias else None
        self.b_down = nnx.Param(jnp.zeros((dim,), jnp.float32)) if config.ffn_bias else None
        self.threshold = None if threshold is None else Threshold(jnp.float32(threshold))

    def normalise(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the input of the neurons [B, T, D]."""
        bias = None if self.norm_bias is None else self.norm_bias[...]
        return normalise(x, self.norm[...], bias, self.config.norm_eps)

    def values(self, h: Float[Array, "B T D"]) -> tuple[Float[Array, "B T F"], Bool[Array, "B T F"]]:
        """Return each neuron's value [B, T, F] and whether it is active, from the normalised input."""
        config = self.config
        gate = None if self.w_gate is None else h @ self.w_gate[...].T
        up = h @ self.w_up[...].T
        if self.b_up is not None:
            up = up + self.b_up[...][None, None, :]
        if self.threshold is not None:
            threshold = self.threshold[...]
        else:
            threshold = config.activation_threshold if config.activation == "fatrelu" else None
        return neuron_values(gate, up, config.activation, threshold)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the FFN's output [B, T, D] for the residual stream ``x``."""
        z, _ = self.values(self.normalise(x))
        y = z @ self.w_down[...]
        return y if self.b_down is None else y + self.b_down[...][None, None, :]
