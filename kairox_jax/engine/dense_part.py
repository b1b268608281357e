"""The dense part of a decode step on the device: embedding, attention and logits, with the key/value cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kairox_jax.engine.programs import (
    Split,
    attend_length,
    cache_length,
    copy_cache_row,
    embed_program,
    front_program,
    logits_program,
    some_rows,
    split_module,
)
from kairox_jax.models import Norm, empty_cache, load_attention, load_down_biases, load_norm
from kairox_jax.models.load import TensorSource

Vectors = Float[Array, "n D"] | Float[np.ndarray, "n D"]


def device_norm(norm: Norm[np.ndarray]) -> Norm[Array]:
    """Put a norm on the device."""
    return jax.tree.map(jnp.asarray, norm)


class DeviceDense:
    """Weights, cache and programs of everything but the neurons, on the JAX device.

    Args:
        source: an open checkpoint.
        batch: B, sequences that the cache holds.
        context_length: the most positions of a sequence.
    """

    name = "device"

    def __init__(self, source: TensorSource, *, batch: int, context_length: int) -> None:
        config = source.config
        self.config, self.batch, self.length = config, batch, cache_length(context_length)
        splits: list[Split] = [
            split_module(load_attention(source, layer)) for layer in range(config.num_layers)
        ]
        self.rebuild = splits[0].rebuild
        self.attention = [split.leaves for split in splits]
        self.ffn_norms = [
            device_norm(load_norm(source, f"layers.{i}.ffn_norm")) for i in range(config.num_layers)
        ]
        self.down_biases = load_down_biases(source)
        self.embedding = jnp.asarray(source.tensor("embed"))
        learned = config.positions == "learned"
        self.pos_embed = jnp.asarray(source.tensor("pos_embed")) if learned else None
        self.out_norm = device_norm(load_norm(source, "out_norm"))
        self.output = self.embedding if config.tie_embeddings else jnp.asarray(source.tensor("output"))
        self.caches = [empty_cache(config, batch=batch, length=self.length) for _ in range(config.num_layers)]
        self._front = front_program(self.rebuild, config)
        self._embed = embed_program()
        self._logits = logits_program(config.norm_eps)

    def embed(self, ids: Int[np.ndarray, "B T"], start: Int[np.ndarray, " B"]) -> Float[Array, "B T D"]:
        """Return the residual stream before the first layer; ``start`` is the first token's position."""
        return self._embed(self.embedding, self.pos_embed, ids, start)

    def front(
        self,
        layer: int,
        x: Vectors,
        y_device: Vectors,
        y_host: Vectors,
        start: Int[np.ndarray, " n"],
        rows: Int[np.ndarray, " n"],
    ) -> tuple[Float[Array, "n D"], Float[Array, "n D"]]:
        """Merge the FFN of the layer before, attend, and return the residual stream and the FFN's input.

        Args:
            layer: index of the layer.
            x: residual stream [n, D].
            y_device, y_host: what the two sides add to it [n, D].
            start: position of each sequence's token, int32 [n].
            rows: each sequence's row of the cache, int32 [n], none twice.
        """
        attend = attend_length(int(start.max()) + 1, self.length)
        x_dev, h_dev, self.caches[layer] = self._front(
            self.attention[layer],
            self.ffn_norms[layer],
            x,
            y_device,
            y_host,
            start,
            some_rows(rows, self.batch),
            self.caches[layer],
            attend,
        )
        h_dev.copy_to_host_async()
        return x_dev, h_dev

    def logits(self, x: Vectors, y_device: Vectors, y_host: Vectors) -> Float[np.ndarray, "B V"]:
        """Merge the last FFN and return the logits on the host."""
        return np.asarray(self._logits(self.out_norm, self.output, x + y_device + y_host))

    def copy_row(self, source: int, target: int, end: int) -> None:
        """Copy the first ``end`` positions of one row of the cache to another."""
        del end  # whole rows: one compiled shape
        self.caches = [copy_cache_row(cache, source, target) for cache in self.caches]
