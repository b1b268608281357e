"""Gradients of the whole model by its predictors' weights, layer by layer: one compiled layer serves all."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from training.forward import LayeredModel, embed
from training.predictor_data import block_parts
from training.predictor_student import Scales, Weights, divergence, student_layer
from training.products import with_products
from training.texts import Windows

STRIDE = 4  # every so many positions enter the divergence: the output matrix would take most of the time


class Student:
    """The compiled functions of a model with predictors, and its arrays on all devices."""

    def __init__(self, model: LayeredModel, scales: list[Scales], products: str, *, reads: str) -> None:
        self.eps, self._adjacent = model.config.norm_eps, reads == "adjacent"
        mesh = Mesh(np.array(jax.devices()), ("data",))
        self.by_row, self.everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
        put = partial(jax.device_put, device=self.everywhere)
        low = jnp.bfloat16 if products == "bfloat16" else jnp.float32
        self.scales = [put(s) for s in scales]
        self.layers = [
            put(jax.tree.map(lambda a: a.astype(low) if a.ndim == 2 else a, state)) for state in model.layers
        ]
        self.embed, self.head = put(model.embed), put(model.head._replace(table=model.head.table.astype(low)))
        layer = partial(student_layer, model.graph, rounding=True)
        self._plain = jax.jit(with_products(layer, products))

        def ahead(state: Any, w: Weights, s: Scales, x: Array, before: Array | None) -> Any:
            rounded = with_products(layer, products)
            return jax.vjp(lambda w, x, before: rounded(state, w, s, x, before), w, x, before)

        self._ahead = jax.jit(ahead)
        self._back = jax.jit(lambda pull, out: pull(out))
        self._head = jax.jit(partial(_head_loss, self.eps, products))
        self._head_grad = jax.jit(
            jax.value_and_grad(partial(_head_loss, self.eps, products), argnums=2, has_aux=True)
        )

    def put(self, rows: np.ndarray) -> Array:
        """Return an array shared out by windows."""
        return jax.device_put(rows, self.by_row)

    def gradient(
        self,
        weights: list[Weights],
        ids: np.ndarray,
        y: np.ndarray,
        prices: Float[np.ndarray, " B"],
        offset: int,
    ) -> tuple[list[Weights], np.ndarray, np.ndarray]:
        """Return the gradient of mean(divergence + price * share), each window's divergence, and its share."""
        x, before, pulls, shares = self.embed[self.put(ids)], None, [], []
        for state, w, s in zip(self.layers, weights, self.scales, strict=True):
            (x, after, share), pull = self._ahead(state, w, s, x, before)
            before = after if self._adjacent else None
            pulls.append(pull)
            shares.append(share)
        (_, found), grad = self._head_grad(self.head, self.put(y[:, offset::STRIDE]), x[:, offset::STRIDE])
        grad_x = jnp.zeros_like(x).at[:, offset::STRIDE].set(grad)
        grad_after = jnp.zeros_like(x)
        price = self.put((prices / len(prices) / len(pulls)).astype(np.float32))
        grads: list[Weights] = []
        for pull in reversed(pulls):
            own, grad_x, of_before = self._back(pull, (grad_x, grad_after, price))
            grad_after = jnp.zeros_like(x) if of_before is None else of_before
            grads.append(own)
        return grads[::-1], np.asarray(found), np.mean(jax.device_get(shares), axis=0)

    def measure(
        self, weights: list[Weights], ids: np.ndarray, y: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each window's divergence and share."""
        x, before, shares = self.embed[self.put(ids)], None, []
        for state, w, s in zip(self.layers, weights, self.scales, strict=True):
            x, after, share = self._plain(state, w, s, x, before)
            before = after if self._adjacent else None
            shares.append(share)
        _, found = self._head(self.head, self.put(y[:, ::STRIDE]), x[:, ::STRIDE])
        return np.asarray(found), np.mean(jax.device_get(shares), axis=0)


def _head_loss(eps: float, products: str, head: Any, y: Array, x: Array) -> tuple[Array, Array]:
    """Return the mean divergence, and each window's."""
    flat = [a.astype(jnp.float32).reshape(-1, a.shape[-1]) for a in (y, x)]
    found = divergence(eps, head, *flat, products=products).reshape(x.shape[:2]).mean(1)
    return found.mean(), found


def output_sizes(model: LayeredModel, windows: Windows) -> Float[np.ndarray, " L"]:
    """Return the mean size of an element of each FFN's output, over a window; its first token is unlike all others."""
    x, sizes = embed(model, windows.ids[:1]), []
    for state in model.layers:
        x, size = _output_size(model.graph, state, x)
        sizes.append(float(size))
    return np.array(sizes)


@partial(jax.jit, static_argnums=0)
def _output_size(graph: Any, state: Any, x: Array) -> tuple[Array, Array]:
    after, _, x = block_parts(nnx.merge(graph, state), x)
    return x, jnp.abs(x - after)[:, 1:].mean()
