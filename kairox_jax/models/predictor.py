"""A layer's activation predictor as a Flax module.

The same function as ``io.Predictors.predict``; training, evaluation and device programs use it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kairox_jax.io.predictors import NORMS, RMS_EPS, LayerPredictor


class Predictor(nnx.Module):
    """score = fc2 relu(fc1 norm(x) + fc1_bias) + bias; x is what ``io.Predictors.input`` says.

    Attributes:
        fc1: [R, D].
        fc1_bias: [R].
        fc2: [F, R].
        bias: [F].
        rest: [D, R], for ``both``; None where nothing stands in for the neurons that are not predicted.
        rest_bias: [D], or None.
        norm: ``none`` or ``rms``, done to x first.
    """

    def __init__(
        self, d_model: int, rank: int, num_neurons: int, *, norm: str, rest: bool = False, rngs: nnx.Rngs
    ) -> None:
        if norm not in NORMS:
            raise ValueError(f"predictor norm {norm!r} is not one of {', '.join(NORMS)}")
        self.norm = norm
        init = nnx.initializers.normal
        self.fc1 = nnx.Param(init(d_model**-0.5)(rngs.params(), (rank, d_model)))
        self.fc1_bias = nnx.Param(jnp.zeros((rank,), jnp.float32))
        self.fc2 = nnx.Param(init(0.1 * rank**-0.5)(rngs.params(), (num_neurons, rank)))
        self.bias = nnx.Param(jnp.zeros((num_neurons,), jnp.float32))
        self.rest = nnx.Param(jnp.zeros((d_model, rank), jnp.float32)) if rest else None
        self.rest_bias = nnx.Param(jnp.zeros((d_model,), jnp.float32)) if rest else None

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch F"]:
        """Return the scores of all neurons."""
        return self.both(x)[0]

    def both(
        self, x: Float[Array, "*batch D"]
    ) -> tuple[Float[Array, "*batch F"], Float[Array, "*batch D"] | None]:
        """Return the scores, and what stands in for the neurons that are not predicted (None: nothing)."""
        ones = (1,) * (x.ndim - 1)
        if self.norm == "rms":
            x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + RMS_EPS)
        hidden = jax.nn.relu(x @ self.fc1[...].T + self.fc1_bias[...].reshape(*ones, -1))
        scores = hidden @ self.fc2[...].T + self.bias[...].reshape(*ones, -1)
        if self.rest is None or self.rest_bias is None:
            return scores, None
        return scores, hidden @ self.rest[...].T + self.rest_bias[...].reshape(*ones, -1)


def load_predictor(predictor: LayerPredictor, norm: str) -> Predictor:
    """Return a stored predictor as a module, its weights unpacked to float32 on the default device."""
    (rank, dim), neurons = predictor.fc1.shape, predictor.fc2.shape[0]
    with_rest = predictor.rest is not None
    module = nnx.eval_shape(
        lambda: Predictor(dim, rank, neurons, norm=norm, rest=with_rest, rngs=nnx.Rngs(0))
    )
    fc1, fc2 = predictor.weights
    zero = {"fc1_bias": np.zeros(rank, np.float32), "bias": np.zeros(neurons, np.float32)}
    module.fc1, module.fc2 = nnx.Param(jnp.asarray(fc1)), nnx.Param(jnp.asarray(fc2))
    for name, values in (("fc1_bias", predictor.fc1_bias), ("bias", predictor.bias)):
        setattr(module, name, nnx.Param(jnp.asarray(zero[name] if values is None else values)))
    if predictor.rest is not None:
        module.rest = nnx.Param(jnp.asarray(predictor.rest.dequantize()))
        module.rest_bias = nnx.Param(jnp.asarray(predictor.rest_bias))
    return module
