"""Run a model over windows in several modes at once and compare each with dense: loss, KL, recall, touched.

Teacher forced, batched, layer by layer: one compiled function serves all layers of a mode, and only the residual
streams of one batch are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kairox_jax.io.predictors import Predictors
from kairox_jax.models import Decoder, load_predictor, normalise, over_threshold
from training.forward import ROWS
from training.measure import batches
from training.predictor_data import block_parts
from training.texts import Windows

SAMPLED = 7  # every so many values of a batch go into the oracle's quantile


@dataclass(frozen=True, kw_only=True)
class Mode:
    """Which neurons are computed.

    Attributes:
        name: of the result.
        rule: ``dense``; ``active`` (exactly those over the model's threshold); ``predicted``; ``oracle`` (those
            of the largest true contribution, a share of each layer); ``random`` (a share).
        predictors: for ``predicted``.
        thresholds: for ``predicted``, in place of those of ``predictors``; float32 [L].
        share: for ``oracle`` and ``random``.
    """

    name: str
    rule: str
    predictors: Predictors | None = None
    thresholds: Float[np.ndarray, " L"] | None = None
    share: float = 1.0


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a mode did.

    Attributes:
        losses: nats of each predicted token, [W, T-1].
        divergence: KL of this mode's next-token distribution from the dense one's, nats, [W, T-1].
        agreement: whether the most probable token is the dense one's, [W, T-1].
        counts: for each window sums over layers and tokens: touched, active, active and touched, contribution,
            contribution touched; float64 [W, 5]. Active is -1 where no threshold tells it.
        layers: the same sums by layer over all windows, [L, 5].
    """

    losses: Float[np.ndarray, "W T"]
    divergence: Float[np.ndarray, "W T"]
    agreement: Float[np.ndarray, "W T"]
    counts: Float[np.ndarray, "W 5"]
    layers: Float[np.ndarray, "L 5"]


class _Head(NamedTuple):
    norm: Array
    bias: Array | None
    table: Array


@partial(jax.jit, static_argnums=(0, 1, 2))
def _layer(
    graph: Any, rule: str, predictor_graph: Any, state: Any, predictor: Any, x: Array, before: Array | None,
    source: Array, threshold: Array, cut: Array, key: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Run one layer of one mode; return the stream, the stream after attention, and the sums [B, 5]."""
    block = nnx.merge(graph, state)
    after, z, _ = block_parts(block, x)
    down = block.ffn.w_down[...]
    part = jnp.abs(z) * jnp.linalg.norm(down, axis=1)[None, None, :]
    left, active = over_threshold(z, jnp.maximum(threshold, 0))
    rest = None
    if rule == "predicted":
        given = jnp.where(source == 1, after, x) if before is None else before
        scores, rest = nnx.merge(predictor_graph, predictor).both(given)
        touched = scores >= cut
    elif rule == "oracle":
        touched = part >= jnp.quantile(part.reshape(-1)[::SAMPLED], 1 - cut)
    elif rule == "random":
        touched = jax.random.uniform(key, z.shape) < cut
    else:
        touched = active if rule == "active" else jnp.ones(z.shape, bool)
    y = (left if rule == "active" else jnp.where(touched, z, 0)) @ down
    if rest is not None:
        y = y + rest
    if block.ffn.b_down is not None:
        y = y + block.ffn.b_down[...][None, None, :]
    counted = jnp.where(threshold < 0, -1.0, active.astype(jnp.float32))
    sums = [touched, counted, touched & active, part, jnp.where(touched, part, 0)]
    return after + y, after, jnp.stack([s.astype(jnp.float32).sum((1, 2)) for s in sums], axis=1)


@partial(jax.jit, static_argnums=0)
def _compare(eps: float, head: _Head, xs: Float[Array, "M B T D"], ids: Int[Array, "B T"]) -> Array:
    """Return loss, KL from the first mode, and agreement with it: [3, M, B, T-1]."""

    def one(row: tuple[Array, Array]) -> Array:
        logits = jax.nn.log_softmax(normalise(row[0], head.norm, head.bias, eps) @ head.table.T)  # [M, V]
        dense = logits[:1]
        loss = -logits[:, row[1]]
        divergence = (jnp.exp(dense) * (dense - logits)).sum(-1)
        agree = logits.argmax(-1) == dense.argmax(-1)
        return jnp.stack([loss, divergence, agree.astype(jnp.float32)])

    modes, batch, tokens, dim = xs.shape
    rows = xs[:, :, :-1].transpose(1, 2, 0, 3).reshape(-1, modes, dim)
    found = jax.lax.map(one, (rows, ids[:, 1:].reshape(-1)), batch_size=max(1, ROWS // modes))
    return found.transpose(1, 2, 0).reshape(3, modes, batch, tokens - 1)


def run_modes(
    decoder: Decoder,
    windows: Windows,
    modes: Sequence[Mode],
    *,
    active_above: Float[np.ndarray, " L"] | None,
    batch: int,
    tick: Callable[[int], object],
) -> list[Outcome]:
    """Run windows in every mode.

    Args:
        decoder: a dense model (without thresholds).
        windows: token windows.
        modes: the first one must be dense: others are compared with it.
        active_above: a neuron is active where |z| exceeds this, by layer; None where nothing tells it.
        batch: windows run at a time.
        tick: called with the windows done, once for each mode.

    Returns:
        One outcome a mode.

    Raises:
        ValueError: the first mode is not dense, a mode lacks what it needs, or a loss is not finite.
    """
    if not modes or modes[0].rule != "dense":
        raise ValueError("the first mode must be dense: the others are compared with it")
    if active_above is None and any(mode.rule == "active" for mode in modes):
        raise ValueError(
            "mode exact needs a SiLU model's thresholds: make them with `python -m training.thresholds`"
        )
    config = decoder.config
    parts = [nnx.split(block) for block in decoder.blocks]
    table = decoder.embed if decoder.output is None else decoder.output
    bias = None if decoder.out_norm_bias is None else decoder.out_norm_bias[...]
    head = _Head(decoder.out_norm[...], bias, table[...])
    above = np.full(config.num_layers, -1.0) if active_above is None else active_above
    runs = [_Run(mode, config.num_layers) for mode in modes]
    shape = (3, len(modes), *windows.ids[:, 1:].shape)
    compared = np.zeros(shape, np.float32)
    counts = np.zeros((len(modes), len(windows.ids), 5))
    layers = np.zeros((len(modes), config.num_layers, 5))
    for _, rows in batches(windows, batch):
        ids = jnp.asarray(windows.ids[rows])
        x0 = decoder.embed_tokens(ids, jnp.zeros(len(rows), jnp.int32))
        streams = []
        for index, run in enumerate(runs):
            x, sums = run.forward(parts, x0, above, int(rows[0]))
            streams.append(x)
            counts[index, rows] = sums.sum(0)
            layers[index] += sums.sum(1)
            tick(len(rows))
        compared[:, :, rows] = _compare(config.norm_eps, head, jnp.stack(streams), ids)
    if not np.isfinite(compared).all():
        raise ValueError("the loss is NaN or infinite: the checkpoint is damaged or overflows float32")
    losses, divergence, agreement = compared
    return [Outcome(losses[m], divergence[m], agreement[m], counts[m], layers[m]) for m in range(len(modes))]


class _Run:
    """One mode, its predictors as modules."""

    def __init__(self, mode: Mode, num_layers: int) -> None:
        self.mode = mode
        self.predictors: list[tuple[Any, Any]] = [(None, None)] * num_layers
        self.cuts = np.full(num_layers, mode.share)
        if mode.rule == "predicted":
            if mode.predictors is None:
                raise ValueError("mode predicted needs predictors: make them with `kairox train-predictors`")
            modules = [load_predictor(part, mode.predictors.norm) for part in mode.predictors.layers]
            self.predictors = [nnx.split(module) for module in modules]
            self.cuts = mode.predictors.thresholds if mode.thresholds is None else mode.thresholds

    def forward(
        self, parts: list[tuple[Any, Any]], x: Array, above: np.ndarray, seed: int
    ) -> tuple[Array, Float[np.ndarray, "L B 5"]]:
        """Run all layers; return the last stream and the sums."""
        input = "own" if self.mode.predictors is None else self.mode.predictors.input
        before: Array | None = None
        sums = []
        for layer, (graph, state) in enumerate(parts):
            predictor_graph, predictor = self.predictors[layer]
            key = jax.random.fold_in(jax.random.key(seed), layer)
            x, after, found = _layer(
                graph, self.mode.rule, predictor_graph, state, predictor, x, before,
                jnp.int32(input != "layer_input"), jnp.float32(above[layer]), jnp.float32(self.cuts[layer]), key,
            )  # fmt: skip
            before = after if input == "adjacent" else None
            sums.append(found)
        return x, np.stack(jax.device_get(sums)).astype(np.float64)
