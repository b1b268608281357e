"""The dense runner: the whole Flax model on the device. The reference for everything else."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float, Int

from kairox_jax.engine.prefill import CHUNKS, Piece, pieces, share_padded
from kairox_jax.engine.programs import (
    attend_length,
    block_program,
    cache_length,
    copy_cache_row,
    embed_program,
    logits_program,
    some_rows,
    split_module,
)
from kairox_jax.models import Decoder, Norm, empty_cache


class Whole:
    """A decoder with the caches of several sequences.

    Args:
        decoder: the model; its arrays are used, not copied.
        batch: B, sequences that the cache holds.
        context_length: the most positions of a sequence.
    """

    few_tokens, mixes = 0, False

    def __init__(self, decoder: Decoder, *, batch: int, context_length: int) -> None:
        config = decoder.config
        self.config, self.batch, self.length = config, batch, cache_length(context_length)
        splits = [split_module(block) for block in decoder.blocks]
        self.blocks = [split.leaves for split in splits]
        self.embedding = decoder.embed[...]
        self.output = self.embedding if decoder.output is None else decoder.output[...]
        self.pos_embed = None if decoder.pos_embed is None else decoder.pos_embed[...]
        bias = None if decoder.out_norm_bias is None else decoder.out_norm_bias[...]
        self.out_norm = Norm(decoder.out_norm[...], bias)
        self.caches = [empty_cache(config, batch=batch, length=self.length) for _ in range(config.num_layers)]
        self._block = block_program(splits[0].rebuild)
        self._embed = embed_program()
        self._logits = logits_program(config.norm_eps)

    def warm_up(self) -> None:
        """Compile what a request runs, so that none of it counts as a request's time."""
        self.prefill_logits(np.zeros(1, np.int32), 0, 0)
        for n in range(1, self.batch + 1):
            nothing = np.zeros(n, np.int32)
            self.step(nothing, nothing, np.arange(n, dtype=np.int32))

    def prefill_logits(self, ids: Int[np.ndarray, " T"], start: int, row: int) -> Float[np.ndarray, " V"]:
        """Run a prompt's tokens in a row of the cache and return the logits after the last one."""
        x_last, rows = None, np.array([row], np.int32)
        for first, last, size in pieces(start, len(ids), CHUNKS):
            padded = np.zeros((1, size), np.int32)
            padded[0, : last - first] = ids[first - start : last - start]
            x = self._run(padded, np.array([first], np.int32), rows)
            x_last = jax.lax.dynamic_index_in_dim(x, last - first - 1, axis=1, keepdims=False)
        return np.asarray(self._logits(self.out_norm, self.output, x_last))[0]

    def share(self, left: Sequence[int], *, beside: int = 0) -> list[int]:
        """Return how many tokens of each prompt's rest to run in the next piece; 0 for one that waits."""
        return share_padded(left, CHUNKS)

    def prefill_together(self, prompts: Sequence[Piece]) -> Float[np.ndarray, "n V"]:
        """Run one piece of each of n prompts and return the logits after each one's last token."""
        return np.stack([self.prefill_logits(*piece) for piece in prompts])

    def run_few(self, prompts: Sequence[Piece]) -> Float[np.ndarray, "n V"]:
        """Do as ``prefill_together``: the whole model is on the device, and short pieces cost little."""
        return self.prefill_together(prompts)

    def step(
        self, ids: Int[np.ndarray, " n"], start: Int[np.ndarray, " n"], rows: Int[np.ndarray, " n"]
    ) -> tuple[Float[np.ndarray, "n V"], None]:
        """Decode one token of each of n sequences; arguments as in ``Hybrid.step``. There is nothing to count."""
        x = self._run(ids[:, None], start, rows)
        return np.asarray(self._logits(self.out_norm, self.output, x[:, 0])), None

    def copy_row(self, source: int, target: int, end: int) -> None:
        """Copy the first ``end`` positions of one row of the cache to another."""
        del end  # whole rows: one compiled shape
        self.caches = [copy_cache_row(cache, source, target) for cache in self.caches]

    def _run(
        self, ids: Int[np.ndarray, "n T"], start: Int[np.ndarray, " n"], rows: Int[np.ndarray, " n"]
    ) -> jax.Array:
        x = self._embed(self.embedding, self.pos_embed, ids, start)
        attend = attend_length(int(start.max()) + ids.shape[1], self.length)
        at = some_rows(rows, self.batch)
        for layer, leaves in enumerate(self.blocks):
            x, self.caches[layer] = self._block(leaves, x, start, at, self.caches[layer], attend)
        return x
