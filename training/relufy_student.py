"""A SiLU model's FFNs as ReLU ones: what is trained, the two losses, and both models' passes over stacked layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kairox_jax.models import Block, neuron_values, normalise
from training.forward import Head, LayeredModel, attend, ffn_output, ffn_values

MATRICES = ("w_gate", "w_up", "w_down")
ROWS = 256  # positions whose logits are held at a time
Params = dict[str, Any]  # a matrix [L, F, D], or its adapter (a [L, F, R], b [L, R, D])


@dataclass(frozen=True)
class Student:
    """What both passes read and training does not change.

    Attributes:
        graph: of one layer.
        layers: all layers' states, stacked along a first axis L.
        embed: embedding [V, D].
        head: final norm and output matrix.
        norm_eps: of the final norm.
    """

    graph: Any
    layers: Any
    embed: Float[Array, "V D"]
    head: Head
    norm_eps: float


jax.tree_util.register_dataclass(Student, ["layers", "embed", "head"], ["graph", "norm_eps"])


def make_student(model: LayeredModel) -> Student:
    """Stack a dense SiLU model's layers."""
    layers = jax.tree.map(lambda *parts: jnp.stack(parts), *model.layers)
    return Student(model.graph, layers, model.embed, model.head, model.config.norm_eps)


def first_params(student: Student, rank: int, seed: int) -> Params:
    """Return what is trained, at its start: the matrices themselves, or adapters that add nothing yet.

    Args:
        student: of whose FFN.
        rank: of the adapters; 0 for whole matrices.
        seed: of the adapters' first factors.
    """
    base = {name: student.layers["ffn"][name][...] for name in MATRICES}
    if rank == 0:
        return {name: jnp.copy(matrix) for name, matrix in base.items()}  # training gives its parameters away
    params, keys = {}, jax.random.split(jax.random.key(seed), len(MATRICES))
    for key, (name, matrix) in zip(keys, base.items(), strict=True):
        layers, neurons, dim = matrix.shape
        second = jax.random.normal(key, (layers, rank, dim)) / jnp.sqrt(jnp.float32(dim))
        params[name] = (jnp.zeros((layers, neurons, rank)), second)
    return params


def merged(student: Student, params: Params) -> dict[str, Float[Array, "L F D"]]:
    """Return the student's FFN matrices of all layers."""
    base = student.layers["ffn"]
    return {
        name: part if not isinstance(part, tuple) else base[name][...] + part[0] @ part[1]
        for name, part in params.items()
    }


def _relu_ffn(block: Any, h: Array, matrices: dict[str, Array]) -> tuple[Array, Array]:
    """Return a ReLU FFN's output for normalised input h, and its active share."""
    z, active = neuron_values(h @ matrices["w_gate"].T, h @ matrices["w_up"].T, "relu", None)
    y = z @ matrices["w_down"]
    return (y if block.ffn.b_down is None else y + block.ffn.b_down[...][None, None, :]), active.mean()


def layer_loss(student: Student, params: Params, ids: Int[Array, "B T"]) -> tuple[Array, dict[str, Array]]:
    """Compare each ReLU FFN with the teacher's on the teacher's inputs.

    Returns:
        The mean over layers and tokens of |y - y'|^2 / |y|^2, and ``error`` (its root) and ``active`` [scalar].
    """

    @jax.checkpoint
    def layer(x: Array, parts: tuple[Any, dict[str, Array]]) -> tuple[Array, tuple[Array, Array]]:
        block = nnx.merge(student.graph, parts[0])
        after, h = attend(block, x)
        z, _, _ = ffn_values(block, h, jnp.float32(-1))
        y = jax.lax.stop_gradient(ffn_output(block, z))
        ours, active = _relu_ffn(block, jax.lax.stop_gradient(block.ffn.normalise(h)), parts[1])
        error = jnp.square(ours - y).sum(-1) / (jnp.square(y).sum(-1) + 1e-6)
        return jax.lax.stop_gradient(after) + y, (error.mean(), active)

    x = student.embed[ids]
    _, (errors, active) = jax.lax.scan(layer, x, (student.layers, merged(student, params)))
    return errors.mean(), {"error": jnp.sqrt(errors).mean(), "active": active.mean()}


def logit_loss(student: Student, params: Params, ids: Int[Array, "B T"]) -> tuple[Array, dict[str, Array]]:
    """Compare the next-token distributions: KL(teacher || student), mean over tokens, in nats.

    Returns:
        The divergence, and ``error`` (the same) and ``active``.
    """

    @jax.checkpoint
    def both(
        streams: tuple[Array, Array], parts: tuple[Any, dict[str, Array]]
    ) -> tuple[tuple[Array, Array], Array]:
        block = nnx.merge(student.graph, parts[0])
        teacher, h = attend(block, streams[0])
        teacher = jax.lax.stop_gradient(teacher + ffn_output(block, ffn_values(block, h, jnp.float32(-1))[0]))
        after, h = attend(block, streams[1])
        y, active = _relu_ffn(block, block.ffn.normalise(h), parts[1])
        return (teacher, after + y), active

    x = student.embed[ids]
    (teacher, ours), active = jax.lax.scan(both, (x, x), (student.layers, merged(student, params)))

    @jax.checkpoint
    def divergence(rows: tuple[Array, Array]) -> Array:
        head = student.head
        log_p, log_q = (
            jax.nn.log_softmax(normalise(row, head.norm, head.bias, student.norm_eps) @ head.table.T)
            for row in rows
        )
        log_p = jax.lax.stop_gradient(log_p)
        return (jnp.exp(log_p) * (log_p - log_q)).sum()

    flat = tuple(stream.reshape(-1, stream.shape[-1]) for stream in (teacher, ours))
    value = jax.lax.map(divergence, flat, batch_size=ROWS).mean()
    return value, {"error": value, "active": active.mean()}


LOSSES = {"layers": layer_loss, "logits": logit_loss}


@partial(jax.jit, static_argnames=("stage", "optimiser"), donate_argnames=("params", "state"))
def train_step(
    student: Student, params: Params, state: Any, ids: Int[Array, "B T"], *, stage: str, optimiser: Any
) -> tuple[Params, Any, dict[str, Array]]:
    """Take one step of a stage (``layers`` or ``logits``); return params, the optimiser's state, and figures."""
    (_, figures), gradient = jax.value_and_grad(LOSSES[stage], argnums=1, has_aux=True)(student, params, ids)
    updates, state = optimiser.update(gradient, state, params)
    return jax.tree.map(lambda p, u: p + u, params, updates), state, figures


def as_layered(model: LayeredModel, student: Student, params: Params) -> LayeredModel:
    """Return the ReLU model for the passes of ``training.measure``."""
    config = replace(model.config, activation="relu")
    graph, _ = nnx.split(nnx.eval_shape(lambda: Block(config, threshold=None, rngs=nnx.Rngs(0))))
    matrices = merged(student, params)
    layers = []
    for index in range(config.num_layers):
        state = jax.tree.map(lambda part, i=index: part[i], student.layers)
        for name, matrix in matrices.items():
            state["ffn"][name] = state["ffn"][name].replace(matrix[index])
        layers.append(state)
    return LayeredModel(config, graph, tuple(layers), model.embed, model.head, model.pos_embed)


def to_host(student: Student, params: Params) -> dict[str, Float[np.ndarray, "L F D"]]:
    """Return the student's FFN matrices as NumPy arrays."""
    return {name: np.asarray(matrix) for name, matrix in merged(student, params).items()}
