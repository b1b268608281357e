"""Activations for training predictors: one model pass over text, to files that training reads in pieces.

For each layer two NumPy files: x, the normalised residual stream after attention (float16), and z, the size of
each neuron's value (one byte, steps of an eighth of an octave). Memory holds one batch; a killed pass goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from kairox_jax.io.predictors import RMS_EPS
from kairox_jax.models import Block, normalise
from training.forward import LayeredModel, embed, loss_gradient
from training.measure import batches
from training.texts import Windows

READS = ("adjacent", "own")  # of ``io.predictors.INPUTS``, what can be trained
STEPS_PER_OCTAVE = 8  # of a code; 4.4 % rounding
LEAST_OCTAVE = -20.0  # code 0 is zero and everything up to this; code 255 is 2^11.9


def block_parts(block: Block, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array]:
    """Run a dense layer.

    Returns:
        The residual stream after attention [B, T, D], the neurons' values [B, T, F], and the residual stream
        after the layer.
    """
    after = x + block.attention(x, jnp.zeros(x.shape[:1], jnp.int32))[0]
    z, _ = block.ffn.values(block.ffn.normalise(x if block.parallel else after))
    y = z @ block.ffn.w_down[...]
    if block.ffn.b_down is not None:
        y = y + block.ffn.b_down[...][None, None, :]
    return after, z, after + y


def rms_normalised(x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Divide by the root mean square, as predictors with norm ``rms`` do."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + RMS_EPS)


def encode_size(z: Float[Array, "*batch F"]) -> UInt8[Array, "*batch F"]:
    """Return the code of |z|."""
    octave = jnp.log2(jnp.maximum(jnp.abs(z), 1e-30))
    return jnp.clip(jnp.rint((octave - LEAST_OCTAVE) * STEPS_PER_OCTAVE), 0, 255).astype(jnp.uint8)


def decode_square(code: UInt8[Array, "*batch F"]) -> Float[Array, "*batch F"]:
    """Return z^2 of a code."""
    octave = code.astype(jnp.float32) / STEPS_PER_OCTAVE + LEAST_OCTAVE
    return jnp.where(code > 0, jnp.exp2(2 * octave), 0)


@partial(jax.jit, static_argnums=0)
def _collect_layer(graph: Any, state: Any, x: Array) -> tuple[Array, Array, Array]:
    after, z, x = block_parts(nnx.merge(graph, state), x)
    return x, rms_normalised(after).astype(jnp.float16), encode_size(z)


@dataclass(frozen=True)
class Activations:
    """The files of one split.

    Attributes:
        folder: where they are.
        num_layers: L.
        reads: what a layer's predictor reads, of ``READS``.
    """

    folder: Path
    num_layers: int
    reads: str

    def inputs(self, layer: int) -> np.ndarray:
        """Return a layer's predictor input, normalised, float16 [N, D]; a view of the file.

        What follows the attention of the layer itself; ``adjacent`` of the layer before, but for layer 0.
        """
        after = max(layer - 1, 0) if self.reads == "adjacent" else layer
        return np.load(self.folder / f"x-{after:03}.npy", mmap_mode="r")

    def outputs(self) -> np.ndarray:
        """Return what the output matrix reads, after the last norm, float16 [N, D]; a view of the file."""
        return np.load(self.folder / "y-000.npy", mmap_mode="r")

    def sizes(self, layer: int) -> np.ndarray:
        """Return the codes of a layer's |z|, uint8 [N, F]; a view of the file."""
        return np.load(self.folder / f"z-{layer:03}.npy", mmap_mode="r")


def collect(
    model: LayeredModel,
    windows: Windows,
    folder: Path,
    *,
    batch: int,
    tick: Callable[[int], object],
    reads: str,
    outputs_only: bool = False,
) -> Activations:
    """Run the dense model over windows and write every layer's files; go on where a killed pass stopped.

    Args:
        model: the model.
        windows: token windows.
        folder: for the files.
        batch: windows run at a time.
        tick: called with the windows done.
        reads: what a layer's predictor reads, of ``READS``.
        outputs_only: write what the output matrix reads, and nothing of the layers.

    Raises:
        ValueError: an activation is not finite.
    """
    config, num = model.config, windows.ids.size
    folder.mkdir(parents=True, exist_ok=True)
    done_file = folder / "done.json"
    done = json.loads(done_file.read_text())["batches"] if done_file.exists() else 0
    mode = "r+" if done else "w+"

    def files(letter: str, dtype: type, width: int, count: int) -> list[np.ndarray]:
        names = [folder / f"{letter}-{layer:03}.npy" for layer in range(count)]
        if done:
            return [np.lib.format.open_memmap(name, "r+") for name in names]
        return [np.lib.format.open_memmap(name, mode, dtype, (num, width)) for name in names]

    feeding = config.num_layers
    if reads == "adjacent" and feeding > 1:
        feeding -= 1  # the last layer's stream feeds no predictor
    xs = files("x", np.float16, config.d_model, 0 if outputs_only else feeding)
    zs = files("z", np.uint8, config.num_neurons, 0 if outputs_only else config.num_layers)
    (ys,) = files("y", np.float16, config.d_model, 1)
    at = 0
    for index, (_, rows) in enumerate(batches(windows, batch)):
        start, at = at, at + len(rows) * windows.ids.shape[1]
        if index >= done:
            x = embed(model, windows.ids[rows])
            for layer, state in enumerate(model.layers):
                x, normalised, code = _collect_layer(model.graph, state, x)
                if layer < len(zs):
                    zs[layer][start:at] = np.asarray(code).reshape(at - start, -1)
                if layer < len(xs):
                    xs[layer][start:at] = np.asarray(normalised).reshape(at - start, -1)
            if not np.isfinite(np.asarray(x)).all():
                raise ValueError(
                    "an activation is NaN or infinite: the checkpoint is damaged or overflows float32"
                )
            y = normalise(x, model.head.norm, model.head.bias, config.norm_eps)
            ys[start:at] = np.asarray(y).reshape(at - start, -1)
            for file in (*xs, *zs, ys):
                file.flush()  # type: ignore[attr-defined]
            write_json(done_file, {"batches": index + 1})
        tick(len(rows))
    return Activations(folder, config.num_layers, reads)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, whole or not at all."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


@partial(jax.jit, static_argnums=0)
def _weights_layer(graph: Any, state: Any, x: Array, grad: Array) -> tuple[Array, Array]:
    block = nnx.merge(graph, state)
    _, pull = jax.vjp(lambda x: block_parts(block, x)[2], x)
    return pull(grad)[0], jnp.square(grad @ block.ffn.w_down[...].T).sum((0, 1))


@partial(jax.jit, static_argnums=0)
def _plain_layer(graph: Any, state: Any, x: Array) -> Array:
    return block_parts(nnx.merge(graph, state), x)[2]


def neuron_weights(
    model: LayeredModel, windows: Windows, *, batch: int, tick: Callable[[int], object]
) -> Float[np.ndarray, "L F"]:
    """Return E[(g . d_i)^2] for each neuron: how much the loss feels its down row d_i, float64 [L, F].

    With the gradient g of the loss by the layer's output, dropping neuron i alone costs 1/2 z_i^2 E[(g . d_i)^2]
    nats to second order: the down row's norm, measured by what the rest of the model makes of it, so that
    contributions of different layers can be compared.
    """
    config = model.config
    total = np.zeros((config.num_layers, config.num_neurons))
    for _, rows in batches(windows, batch):
        inputs = [embed(model, windows.ids[rows])]
        for state in model.layers:
            inputs.append(_plain_layer(model.graph, state, inputs[-1]))
        ids = jnp.asarray(windows.ids[rows])
        grad = loss_gradient(config.norm_eps, model.head, inputs.pop(), ids)
        for layer in reversed(range(config.num_layers)):
            grad, sums = _weights_layer(model.graph, model.layers[layer], inputs.pop(), grad)
            total[layer] += np.asarray(sums)
        tick(len(rows))
    return np.maximum(total / windows.ids.size, 1e-30)
