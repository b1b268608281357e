"""Passes of a model over token windows, each streaming: sums and histograms stay, activations do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from training.forward import (
    LayeredModel,
    embed,
    histogram_layer,
    loss_gradient,
    run_layer,
    sensitivity_layer,
    token_losses,
)
from training.statistics import BINS
from training.texts import Windows

Tick = Callable[[int], object]  # gets the work done, in windows evaluated with losses

# Work of the other passes per window, for the time left.
HISTOGRAM_COST, SENSITIVITY_COST, PROFILE_COST = 1, 4, 1


@dataclass(frozen=True, eq=False)
class Measurement:
    """One pass over windows.

    Attributes:
        losses: nats of each predicted token, float32 [W, T-1].
        active: for each kind, how many tokens each neuron was active for, int64 [L, F].
        tokens: for each kind, the tokens seen.
    """

    losses: Float[np.ndarray, "W T-1"]
    active: dict[str, Int[np.ndarray, "L F"]]
    tokens: dict[str, int]

    def loss(self, windows: Windows, kind: str) -> float:
        """Return the mean loss of a kind, nats per token."""
        return float(self.losses[windows.rows(kind)].mean(dtype=np.float64))

    def active_frac(self, kind: str) -> float:
        """Return the share of neurons active per token, over all layers."""
        return float(self.active[kind].mean() / self.tokens[kind])

    def frequency(self) -> Float[np.ndarray, "L F"]:
        """Return the share of tokens at which each neuron was active, each kind weighing the same."""
        return np.mean([count / self.tokens[kind] for kind, count in self.active.items()], axis=0)


def batches(windows: Windows, batch: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield row numbers of at most ``batch`` windows of one kind, with the kind."""
    for kind in windows.present():
        rows = windows.rows(kind)
        for start in range(0, len(rows), batch):
            yield kind, rows[start : start + batch]


def evaluate(
    model: LayeredModel,
    windows: Windows,
    thresholds: Float[np.ndarray, " L"] | None,
    *,
    batch: int,
    tick: Tick,
    losses: bool = True,
) -> Measurement:
    """Measure losses and active neurons under thresholds.

    Args:
        model: the model.
        windows: token windows.
        thresholds: one a layer; None for the dense function.
        batch: windows run at a time.
        tick: called after each batch with the work done.
        losses: False skips the output matrix and returns losses of 0.

    Raises:
        ValueError: a loss is not finite.
    """
    config = model.config
    values = np.full(config.num_layers, model.dense_threshold) if thresholds is None else thresholds
    values = [jnp.float32(value) for value in values]
    result = np.zeros((len(windows.ids), windows.ids.shape[1] - 1), np.float32)
    shape = (config.num_layers, config.num_neurons)
    active = {kind: np.zeros(shape, np.int64) for kind in windows.present()}
    for kind, rows in batches(windows, batch):
        ids = jnp.asarray(windows.ids[rows])
        x, counts = embed(model, windows.ids[rows]), []
        for state, value in zip(model.layers, values, strict=True):
            x, count = run_layer(model.graph, state, x, value)
            counts.append(count)
        active[kind] += np.stack(jax.device_get(counts))
        if losses:
            result[rows] = token_losses(config.norm_eps, model.head, x, ids)
        tick(len(rows) * (1 if losses else PROFILE_COST))
    if not np.isfinite(result).all():
        row = int(np.argmin(np.isfinite(result).all(axis=1)))
        raise ValueError(
            f"the loss of window {row} ({windows.kinds[row]}) is NaN or infinite: the checkpoint is "
            "damaged or overflows float32"
        )
    tokens = {kind: len(windows.rows(kind)) * windows.ids.shape[1] for kind in windows.present()}
    return Measurement(result, active, tokens)


def histograms(model: LayeredModel, windows: Windows, *, batch: int, tick: Tick) -> Int[np.ndarray, "L bins"]:
    """Return the histogram of each layer under the dense function (see ``histogram_layer``), int64 [L, bins].

    Raises:
        ValueError: a layer without any value above zero.
    """
    total, dense = np.zeros((model.config.num_layers, BINS), np.int64), jnp.float32(model.dense_threshold)
    for _, rows in batches(windows, batch):
        x, counts = embed(model, windows.ids[rows]), []
        for state in model.layers:
            x, count = histogram_layer(model.graph, state, x, dense)
            counts.append(count)
        total += np.stack(jax.device_get(counts))
        tick(len(rows) * HISTOGRAM_COST)
    if not total.sum(axis=1).all():
        layer = int(np.argmin(total.sum(axis=1)))
        raise ValueError(
            f"every neuron of layer {layer} is zero or NaN on all of the text: the checkpoint is damaged or "
            "overflows float32"
        )
    return total


def sensitivities(
    model: LayeredModel,
    windows: Windows,
    edges: Float[np.ndarray, "L J"],
    *,
    batch: int,
    tick: Tick,
) -> Float[np.ndarray, "K L J"]:
    """Estimate what each layer's thresholds would cost alone, nats per token, for each kind present.

    Args:
        model: the model.
        windows: token windows.
        edges: candidate thresholds, float32 [L, J].
        batch: windows run at a time.
        tick: called after each batch with the work done.

    Source: the second-order (Fisher) estimate of ``forward.sensitivity_layer``.
    """
    kinds, dense = windows.present(), jnp.float32(model.dense_threshold)
    cost = np.zeros((len(kinds), *edges.shape))
    edges_dev = [jnp.asarray(row, jnp.float32) for row in edges]
    for kind, rows in batches(windows, batch):
        inputs = [embed(model, windows.ids[rows])]
        for state in model.layers:
            inputs.append(run_layer(model.graph, state, inputs[-1], dense)[0])
        ids = jnp.asarray(windows.ids[rows])
        grad = loss_gradient(model.config.norm_eps, model.head, inputs.pop(), ids)
        for layer in reversed(range(model.config.num_layers)):
            grad, sums = sensitivity_layer(
                model.graph, model.layers[layer], inputs.pop(), grad, edges_dev[layer], dense
            )
            cost[kinds.index(kind), layer] += np.asarray(sums)
        tick(len(rows) * SENSITIVITY_COST)
    tokens = [len(windows.rows(kind)) * windows.ids.shape[1] for kind in kinds]
    return cost / np.array(tokens)[:, None, None]
