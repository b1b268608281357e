"""Products with rounded operands: as good as bfloat16 allows, in both directions, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from training.products import with_products

STEP = 2.0**-8  # relative rounding of bfloat16


def model(w: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    hidden = jax.nn.silu(x @ w["a"].T)
    scores = jnp.einsum("bth,bsh->bts", hidden, hidden)  # a batched product stays as it is
    return hidden @ w["b"], scores


def arrays(rng: np.random.Generator) -> tuple[dict[str, jax.Array], jax.Array]:
    shapes = {"a": (192, 128), "b": (192, 96)}
    w = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    w["a"] = w["a"] / 8  # so that the gate is neither flat nor saturated
    return w, jnp.asarray(rng.normal(size=(2, 50, 128)), jnp.float32)


def test_operands_are_rounded_and_nothing_else(rng: np.random.Generator) -> None:
    w, x = arrays(rng)
    low = lambda a: np.asarray(a.astype(jnp.bfloat16), np.float64)  # noqa: E731
    gate = low(x) @ low(w["a"]).T
    hidden = (gate / (1 + np.exp(-gate))).astype(np.float32)
    got, scores = jax.jit(with_products(model, "bfloat16"))(w, x)
    want = low(jnp.asarray(hidden)) @ low(w["b"])
    # A hidden value at the middle between two bfloat16 may round the other way: one step of one operand.
    np.testing.assert_allclose(got, want, atol=2 * STEP * np.abs(want).max())
    assert np.linalg.norm(got - want) < 0.1 * STEP * np.linalg.norm(want)
    np.testing.assert_allclose(scores, np.einsum("bth,bsh->bts", hidden, hidden), rtol=1e-4, atol=1e-3)
    assert with_products(model, "float32") is model


def test_gradients_are_those_of_float32_within_rounding(rng: np.random.Generator) -> None:
    w, x = arrays(rng)

    def loss(function: object) -> object:
        return jax.jit(jax.grad(lambda w, x: sum(jnp.sin(a).sum() for a in function(w, x)), argnums=(0, 1)))  # type: ignore[operator]

    small = jax.tree.map(lambda a: 0.1 * a, (w, x))
    got, want = (loss(f)(*small) for f in (with_products(model, "bfloat16"), model))  # type: ignore[operator]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        error = float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
        assert 0 < error < 2 * STEP


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="products 'int8' is not one of float32, bfloat16"):
        with_products(model, "int8")
