"""Run a function with its matrix products in bfloat16, their sums in float32; everything else as it is.

On a CPU with matrix units (AMX) a layer's products run six times as fast so, which end-to-end training lives on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

LEAST_SIZE = 1 << 20  # multiplications
PRODUCTS = ("float32", "bfloat16")


def with_products(function: Callable[..., Any], products: str) -> Callable[..., Any]:
    """Return a function of the same arrays whose matrix products take ``products`` operands.

    Args:
        function: of arrays and pytrees of them; differentiable before and after.
        products: ``float32`` returns ``function`` itself; ``bfloat16`` rounds both operands of large products.

    Raises:
        ValueError: another type.
    """
    if products not in PRODUCTS:
        raise ValueError(f"products {products!r} is not one of {', '.join(PRODUCTS)}")
    if products == "float32":
        return function

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        values = _evaluate(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), values)

    return run


def _evaluate(closed: ClosedJaxpr, args: list[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
    for equation in jaxpr.eqns:
        inputs = [v.val if isinstance(v, Literal) else known[v] for v in equation.invars]
        plain = equation.primitive.name == "dot_general" and equation.params["dimension_numbers"][1] == (
            (),
            (),
        )
        if plain:
            outputs = [rounded_product(inputs[0], inputs[1], equation.params["dimension_numbers"])]
        else:
            params = equation.primitive.get_bind_params(equation.params)
            found = equation.primitive.bind(*inputs, **params)
            outputs = found if equation.primitive.multiple_results else [found]
        known |= zip(equation.outvars, outputs, strict=True)
    return [v.val if isinstance(v, Literal) else known[v] for v in jaxpr.outvars]


def _is_large(equation: Any) -> bool:
    """Say whether a product is of weights, and of a size that XLA has a kernel for: it lacks some of the smallest."""
    (contracted, _), batched = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    size = equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
    return batched == ((), ()) and size >= LEAST_SIZE


def rounded_product(a: Any, b: Any, dimensions: Any) -> Any:
    """Multiply with operands rounded to bfloat16 and a float32 sum.

    So is the gradient of ``a`` made. That of ``b``, a weight, sums over all tokens: of rounded operands, but by a
    float32 product, since XLA's CPU backend lacks some of those otherwise.
    """
    shape = jax.ShapeDtypeStruct(a.shape, jnp.float32)

    def low(a: Any, b: Any) -> tuple[Any, Any]:
        return a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)

    @jax.custom_vjp
    def product(a: Any, b: Any) -> Any:
        a, b = low(a, b)
        return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)

    def forward(a: Any, b: Any) -> Any:
        return product(a, b), low(a, b)

    def backward(kept: Any, grad: Any) -> Any:
        a, b = (v.astype(jnp.float32) for v in kept)

        def of_a(b: Any, grad: Any) -> Any:
            transposed: Any = jax.linear_transpose(lambda a: jax.lax.dot_general(a, b, dimensions), shape)
            return transposed(grad)[0]

        closed = jax.make_jaxpr(of_a)(b, grad)
        (grad_a,) = _evaluate(closed, [b, grad])
        of_b: Any = jax.linear_transpose(lambda b: jax.lax.dot_general(a, b, dimensions), b)
        return grad_a, of_b(grad)[0]

    product.defvjp(forward, backward)
    return product(a, b)
