"""The dense runner: the whole Flax model on the device. The reference for everything else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from kairox_jax.engine.prefill import pieces
from kairox_jax.engine.programs import (
    attend_length,
    block_program,
    cache_length,
    embed_program,
    logits_program,
    split_module,
)
from kairox_jax.models import Decoder, Norm, empty_cache


class Whole:
    """A decoder with its cache, one sequence at a time.

    Args:
        decoder: the model; its arrays are used, not copied.
        context_length: the most positions of a sequence.
    """

    def __init__(self, decoder: Decoder, *, context_length: int) -> None:
        config = decoder.config
        self.config, self.length = config, cache_length(context_length)
        splits = [split_module(block) for block in decoder.blocks]
        self.blocks = [split.leaves for split in splits]
        self.embedding = decoder.embed[...]
        self.output = self.embedding if decoder.output is None else decoder.output[...]
        self.pos_embed = None if decoder.pos_embed is None else decoder.pos_embed[...]
        bias = None if decoder.out_norm_bias is None else decoder.out_norm_bias[...]
        self.out_norm = Norm(decoder.out_norm[...], bias)
        self.caches = [empty_cache(config, batch=1, length=self.length) for _ in range(config.num_layers)]
        self._block = block_program(splits[0].rebuild)
        self._embed = embed_program()
        self._logits = logits_program(config.norm_eps)

    def prefill(self, ids: Int[np.ndarray, " T"], start: int) -> Float[np.ndarray, " V"]:
        """Run a prompt's tokens and return the logits after the last one."""
        x_last = None
        for first, last, size in pieces(start, len(ids)):
            padded = np.zeros((1, size), np.int32)
            padded[0, : last - first] = ids[first - start : last - start]
            x = self._run(padded, first)
            x_last = jax.lax.dynamic_index_in_dim(x, last - first - 1, axis=1, keepdims=False)
        return np.asarray(self._logits(self.out_norm, self.output, x_last))[0]

    def step(self, token: int, start: int) -> Float[np.ndarray, " V"]:
        """Decode one token and return the logits after it."""
        x = self._run(np.array([[token]], np.int32), start)
        return np.asarray(self._logits(self.out_norm, self.output, x[:, 0]))[0]

    def _run(self, ids: Int[np.ndarray, "1 T"], first: int) -> jax.Array:
        start = jnp.array([first], jnp.int32)
        x = self._embed(self.embedding, self.pos_embed, jnp.asarray(ids), start)
        attend = attend_length(first + ids.shape[1], self.length)
        for layer, leaves in enumerate(self.blocks):
            x, self.caches[layer] = self._block(leaves, x, start, self.caches[layer], attend)
        return x
