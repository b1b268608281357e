"""The dense part of a decode step in the host's kernels, for machines whose JAX device is the CPU itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from kairox_jax.engine.programs import cache_length
from kairox_jax.host import AttentionWeights, HostAttention, aligned_zeros, host_formats, host_norm, matvec
from kairox_jax.io import Checkpoint
from kairox_jax.models import load_down_biases, load_norm, rotary_frequencies
from kairox_jax.placement import Arena
from kairox_jax.quant import PackedRows


def packed_or_float(checkpoint: Checkpoint, name: str) -> PackedRows:
    """Return a matrix in the file's own rows where the kernels read them, else in float32."""
    packed = checkpoint.packed(name)
    if packed is not None and packed.format in host_formats():
        checkpoint.check_packed(name)
        return packed
    return PackedRows(data=checkpoint.tensor(name).view(np.uint8), format="f32")


def stacked(parts: list[PackedRows]) -> PackedRows:
    """Put the rows of several matrices under each other; in float32 where their formats differ."""
    formats = {part.format for part in parts}
    if len(formats) == 1:
        return PackedRows(data=np.concatenate([part.data for part in parts]), format=formats.pop())
    whole = np.concatenate([part.dequantize() for part in parts])
    return PackedRows(data=whole.view(np.uint8), format="f32")


def kept(arena: Arena, matrix: PackedRows) -> PackedRows:
    """Copy a matrix to the arena."""
    return replace(matrix, data=arena.keep(matrix.data))


class HostDense:
    """Weights, cache and kernels of everything but the neurons, on the host.

    Args:
        checkpoint: an open checkpoint.
        batch: B, sequences that the cache holds.
        context_length: the most positions of a sequence.
        activations: of the kernels, one of ``HOST_ACTIVATIONS``.
        arena: for the matrices; one of its own where not given.
    """

    name = "host kernels"

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        batch: int,
        context_length: int,
        activations: str = "float32",
        arena: Arena | None = None,
    ) -> None:
        self.config = config = checkpoint.config
        self.activations = activations
        self.batch, self.length = batch, cache_length(context_length)
        arena = Arena() if arena is None else arena
        self.weights = list[AttentionWeights]()
        for layer in range(config.num_layers):
            self.weights.append(self._layer_weights(checkpoint, layer, arena))
            checkpoint.release()  # else the file's pages stay in memory beside their copies
        self.down_biases = load_down_biases(checkpoint)
        self.embedding = kept(arena, packed_or_float(checkpoint, "embed"))
        tied = config.tie_embeddings
        self.output = self.embedding if tied else kept(arena, packed_or_float(checkpoint, "output"))
        checkpoint.release()
        learned = config.positions == "learned"
        self.pos_embed = checkpoint.tensor("pos_embed") if learned else None
        self.out_norm = load_norm(checkpoint, "out_norm")
        shape = (config.num_layers, batch, config.num_kv_heads, self.length, config.head_dim)
        self.keys, self.values = aligned_zeros(*shape), aligned_zeros(*shape)
        self._kernel = HostAttention(config, batch=batch, length=self.length, activations=activations)
        self._frequencies = np.empty(0, np.float32) if learned else rotary_frequencies(config)
        self._logits = np.empty((batch, config.vocab_size), np.float32)
        self._angles = (np.empty((0, 0), np.float32), np.empty((0, 0), np.float32))

    @staticmethod
    def _layer_weights(checkpoint: Checkpoint, layer: int, arena: Arena) -> AttentionWeights:
        config, prefix = checkpoint.config, f"layers.{layer}."

        def vectors(wanted: bool, *names: str) -> np.ndarray:
            parts = [checkpoint.tensor(prefix + name) for name in names if wanted]
            return np.concatenate([np.empty(0, np.float32), *parts])

        shifted = config.norm == "layernorm"
        return AttentionWeights(
            norm=checkpoint.tensor(prefix + "attn_norm"),
            norm_bias=vectors(shifted, "attn_norm_bias"),
            ffn_norm=checkpoint.tensor(prefix + "ffn_norm"),
            ffn_norm_bias=vectors(shifted, "ffn_norm_bias"),
            wqkv=kept(
                arena, stacked([packed_or_float(checkpoint, prefix + name) for name in ("wq", "wk", "wv")])
            ),
            bqkv=vectors(config.qkv_bias, "bq", "bk", "bv"),
            wo=kept(arena, packed_or_float(checkpoint, prefix + "wo")),
            bo=vectors(config.out_bias, "bo"),
        )

    def embed(self, ids: Int[np.ndarray, "B T"], start: Int[np.ndarray, " B"]) -> Float[np.ndarray, "B T D"]:
        """Return the residual stream before the first layer, a fresh array; ``start`` as in ``front``."""
        rows = PackedRows(data=self.embedding.data[ids.reshape(-1)], format=self.embedding.format)
        x = rows.dequantize().reshape(*ids.shape, self.config.d_model)
        if self.pos_embed is not None:
            at = start[:, None] + np.arange(ids.shape[1])
            x += np.take(self.pos_embed, at, axis=0, mode="clip")  # a prompt's padding lies beyond
        return x

    def front(
        self,
        layer: int,
        x: Any,
        y_device: Any,
        y_host: Float[np.ndarray, "n D"],
        start: Int[np.ndarray, " n"],
        rows: Int[np.ndarray, " n"],
    ) -> tuple[Float[np.ndarray, "n D"], Float[np.ndarray, "n D"]]:
        """Merge the FFN of the layer before, attend, and return the residual stream and the FFN's input.

        Arguments as in ``DeviceDense.front``; ``x`` is updated in place.
        """
        angles = self.turned(layer, start)
        x += y_host
        x += np.asarray(y_device)
        keys, values = self.keys[layer], self.values[layer]
        return x, self._kernel.front(self.weights[layer], x, keys, values, rows, start, *angles)

    def prompt(
        self,
        layer: int,
        x: Float[np.ndarray, "T D"],
        positions: Int[np.ndarray, " T"],
        rows: Int[np.ndarray, " T"],
    ) -> Float[np.ndarray, "T D"]:
        """Attend with a prompt's tokens and return the FFN's input, which the next call overwrites.

        Args:
            layer: index of the layer; layer 0 comes first.
            x: residual stream, updated in place.
            positions: of the tokens, int32 [T]; those of a sequence follow each other.
            rows: each token's row of the cache, int32 [T].
        """
        angles, keys, values = self.turned(layer, positions), self.keys[layer], self.values[layer]
        return self._kernel.prompt(self.weights[layer], x, keys, values, rows, positions, *angles)

    def turned(self, layer: int, positions: Int[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines and sines of the positions' angles; they are those of layer 0 in all others."""
        if layer == 0:
            angle = positions[:, None].astype(np.float32) * self._frequencies[None, :]
            self._angles = (np.cos(angle), np.sin(angle))
        return self._angles

    def logits(self, x: Any, y_device: Any, y_host: Float[np.ndarray, "B D"]) -> Float[np.ndarray, "B V"]:
        """Merge the last FFN and return the logits; overwritten by the next call."""
        merged, norm = np.asarray(x) + np.asarray(y_device) + y_host, self.out_norm
        h = host_norm(merged, norm.scale, norm.bias, self.config.norm_eps)
        logits = self._logits[: len(h)]
        matvec(h, self.output, logits, activations=self.activations)
        return logits

    def copy_row(self, source: int, target: int, end: int) -> None:
        """Copy the first ``end`` positions of one row of the cache to another."""
        self.keys[:, target, :, :end] = self.keys[:, source, :, :end]
        self.values[:, target, :, :end] = self.values[:, source, :, :end]
