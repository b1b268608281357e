"""The decoder: embedding, blocks of attention and FFN, and the output matrix."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kairox_jax.config import ModelConfig
from kairox_jax.models.attention import Attention, KVCache, rms_norm
from kairox_jax.models.ffn import FFN


class Block(nnx.Module):
    """One layer: attention, then FFN, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, threshold: float | None, rngs: nnx.Rngs) -> None:
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
        x = x + y
        return x + self.ffn(x), cache


class Decoder(nnx.Module):
    """A causal language model; call it on token ids [B, T] to get logits [B, T, V].

    Args:
        config: facts of the checkpoint.
        thresholds: one activation threshold a layer, or None for the dense function.
        rngs: of the initial weights (``load_model`` replaces them).
    """

    def __init__(
        self, config: ModelConfig, *, thresholds: Sequence[float] | None = None, rngs: nnx.Rngs
    ) -> None:
        if thresholds is not None and len(thresholds) != config.num_layers:
            raise ValueError(f"{len(thresholds)} thresholds for {config.num_layers} layers: give one a layer")
        self.config = config
        init = nnx.initializers.normal(0.02)
        table = (config.vocab_size, config.d_model)
        self.embed = nnx.Param(init(rngs.params(), table))
        per_layer = [None] * config.num_layers if thresholds is None else list(thresholds)
        self.blocks = nnx.List([Block(config, threshold=t, rngs=rngs) for t in per_layer])
        self.out_norm = nnx.Param(jnp.ones((config.d_model,), jnp.float32))
        self.output = None if config.tie_embeddings else nnx.Param(init(rngs.params(), table))

    def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Return the logits of every position.

        Raises:
            ValueError: ``ids`` has not two axes.
        """
        if ids.ndim != 2:
            raise ValueError(f"token ids have shape {ids.shape}: expected [batch, tokens]; add an axis")
        x = self.embed[...][ids]
        start = jnp.zeros(ids.shape[:1], jnp.int32)
        for block in self.blocks:
            x, _ = block(x, start)
        return self.logits(x)

    def logits(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Return the logits of a residual stream [..., D]."""
        table = self.embed if self.output is None else self.output
        return rms_norm(x, self.out_norm[...], self.config.norm_eps) @ table[...].T
