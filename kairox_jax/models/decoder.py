"""The decoder: embedding, blocks of attention and FFN, and the output matrix."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from kairox_jax.config import ModelConfig
from kairox_jax.models.attention import Attention, KVCache
from kairox_jax.models.ffn import FFN
from kairox_jax.models.norm import normalise


class Block(nnx.Module):
    """One layer: attention, then FFN, each added to the residual stream; both of its input if parallel."""

    def __init__(self, config: ModelConfig, *, threshold: float | None, rngs: nnx.Rngs) -> None:
        self.parallel = config.parallel_block
        self.attention = Attention(config, rngs=rngs)
        self.ffn = FFN(config, threshold=threshold, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        start: Int[Array, " B"],
        cache: KVCache | None = None,
        *,
        attend: int | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Return the residual stream after this layer and the extended cache (see ``Attention``)."""
        y, cache = self.attention(x, start, cache, attend=attend)
        if self.parallel:
            return x + y + self.ffn(x), cache
        x = x + y
        return x + self.ffn(x), cache


class Decoder(nnx.Module):
    """A causal language model; call it on token ids [B, T] to get logits [B, T, V].

    Its state holds, as ``nnx.Param``: ``embed`` [V, D], ``pos_embed`` [P, D] where positions are learned,
    ``blocks.{l}.attention`` and ``blocks.{l}.ffn`` (see there), ``out_norm`` and ``out_norm_bias`` [D], and
    ``output`` [V, D] unless tied. Thresholds are ``Threshold`` variables, not trained.

    Args:
        config: facts of the checkpoint.
        thresholds: one activation threshold a layer, or None for the dense function.
        rngs: of the initial weights (``load_model`` replaces them).

    Raises:
        ValueError: thresholds for another number of layers, or for an activation that takes none.
    """

    def __init__(
        self, config: ModelConfig, *, thresholds: Sequence[float] | None = None, rngs: nnx.Rngs
    ) -> None:
        if thresholds is not None and len(thresholds) != config.num_layers:
            raise ValueError(f"{len(thresholds)} thresholds for {config.num_layers} layers: give one a layer")
        self.config = config
        init = nnx.initializers.normal(0.02)
        dim, table = config.d_model, (config.vocab_size, config.d_model)
        learned, shifted = config.positions == "learned", config.norm == "layernorm"
        self.embed = nnx.Param(init(rngs.params(), table))
        self.pos_embed = nnx.Param(init(rngs.params(), (config.context_length, dim))) if learned else None
        per_layer = [None] * config.num_layers if thresholds is None else list(thresholds)
        self.blocks = nnx.List([Block(config, threshold=t, rngs=rngs) for t in per_layer])
        self.out_norm = nnx.Param(jnp.ones((dim,), jnp.float32))
        self.out_norm_bias = nnx.Param(jnp.zeros((dim,), jnp.float32)) if shifted else None
        self.output = None if config.tie_embeddings else nnx.Param(init(rngs.params(), table))

    def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Return the logits of every position, float32.

        Raises:
            ValueError: ``ids`` has not two axes, is longer than the context, or holds an id out of range.
            TypeError: ``ids`` are no whole numbers.
        """
        _check_ids(ids, self.config)
        start = jnp.zeros(ids.shape[:1], jnp.int32)
        x = self.embed_tokens(ids, start)
        for block in self.blocks:
            x, _ = block(x, start)
        return self.logits(x)

    def extend(
        self, ids: Int[Array, "B T"], start: Int[Array, " B"], caches: Sequence[KVCache]
    ) -> tuple[Float[Array, "B T V"], list[KVCache]]:
        """Go on with sequences whose earlier positions are cached.

        Args:
            ids: the next T tokens of each sequence.
            start: how many positions each sequence has already, int32 [B]; ``start + T`` must fit the caches.
            caches: one a layer; begin with ``empty_cache``.

        Returns:
            The logits of the new positions and the extended caches.

        Raises:
            ValueError: as for the call, or another number of caches than layers.
            TypeError: ``ids`` are no whole numbers.
        """
        _check_ids(ids, self.config)
        if len(caches) != self.config.num_layers:
            raise ValueError(f"{len(caches)} caches for {self.config.num_layers} layers: give one a layer")
        x, extended = self.embed_tokens(ids, start), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block(x, start, cache)
            extended.append(cache)
        return self.logits(x), extended

    def embed_tokens(self, ids: Int[Array, "B T"], start: Int[Array, " B"]) -> Float[Array, "B T D"]:
        """Return the residual stream before the first layer; ``start`` is the first token's position."""
        x = self.embed[...][jnp.asarray(ids)]
        if self.pos_embed is None:
            return x
        return x + self.pos_embed[...][start[:, None] + jnp.arange(ids.shape[1])[None, :]]

    def logits(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Return the logits of a residual stream [..., D]."""
        table = self.embed if self.output is None else self.output
        bias = None if self.out_norm_bias is None else self.out_norm_bias[...]
        return normalise(x, self.out_norm[...], bias, self.config.norm_eps) @ table[...].T


def _check_ids(ids: Array, config: ModelConfig) -> None:
    if ids.ndim != 2:
        raise ValueError(f"token ids have shape {ids.shape}: expected [batch, tokens]; add an axis")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"token ids are {ids.dtype}: expected whole numbers, such as int32")
    if ids.shape[1] > config.context_length:
        raise ValueError(
            f"{ids.shape[1]} tokens: this model takes at most {config.context_length}; give it fewer"
        )
    # Values are known only outside a trace; inside, XLA clamps an id to the table.
    if ids.size and not isinstance(ids, Tracer):
        values = np.asarray(ids)  # NumPy's copy: JAX's own min would become part of an enclosing trace
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= config.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(
                f"token id {wrong} is not in the vocabulary: expected 0 to {config.vocab_size - 1}"
            )
