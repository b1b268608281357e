"""The feed-forward network, neuron by neuron: row i of each matrix belongs to neuron i."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from kairox_jax.config import ModelConfig
from kairox_jax.models.attention import rms_norm
from kairox_jax.models.rules import neuron_values


class Threshold(nnx.Variable):
    """A layer's activation threshold: kept with the state, not trained as a weight."""


class FFN(nnx.Module):
    """Pre-norm gated FFN: ``y = sum over active i of z_i w_down[i]``; the caller adds the residual.

    Attributes:
        norm: [D] RMS norm's scale.
        w_gate, w_up, w_down: [F, D]; the down matrix is stored by neuron, as its records are.
        threshold: scalar of the activation rule, or None for the dense function of a SiLU model.
    """

    def __init__(self, config: ModelConfig, *, threshold: float | None, rngs: nnx.Rngs) -> None:
        self.config = config
        shape = (config.num_neurons, config.d_model)
        init = nnx.initializers.normal(0.02)
        self.norm = nnx.Param(jnp.ones((config.d_model,), jnp.float32))
        self.w_gate = nnx.Param(init(rngs.params(), shape))
        self.w_up = nnx.Param(init(rngs.params(), shape))
        self.w_down = nnx.Param(init(rngs.params(), shape))
        self.threshold = None if threshold is None else Threshold(jnp.float32(threshold))

    def normalise(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the input of the neurons [B, T, D]."""
        return rms_norm(x, self.norm[...], self.config.norm_eps)

    def values(self, h: Float[Array, "B T D"]) -> tuple[Float[Array, "B T F"], Bool[Array, "B T F"]]:
        """Return each neuron's value [B, T, F] and whether it is active, from the normalised input."""
        threshold = None if self.threshold is None else self.threshold[...]
        gate, up = h @ self.w_gate[...].T, h @ self.w_up[...].T
        return neuron_values(gate, up, self.config.activation, threshold)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the FFN's output [B, T, D] for the residual stream ``x``."""
        z, _ = self.values(self.normalise(x))
        return z @ self.w_down[...]
