"""Train all predictors together so that the whole model's next-token distribution stays the dense one's.

Loss: KL divergence from dense, plus a price for each touched neuron that is moved until every kind of text touches
the wanted share. AdamW; held-out loss and an Orbax checkpoint every so many steps; data parallel by sharding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int

from training.forward import LayeredModel
from training.predictor_fit import Checkpoints, Fitted
from training.predictor_price import Price
from training.predictor_step import STRIDE, Student, output_sizes
from training.predictor_student import Scales, Weights, begin, stored
from training.texts import Windows


@dataclass(frozen=True, kw_only=True)
class DistilSettings:
    """How all predictors are trained together.

    Attributes:
        steps: the most steps.
        batch: windows of a step; rounded up to a multiple of the devices.
        rate: AdamW's highest step size; warm-up, then cosine decay.
        every: steps between held-out losses, which are also the times of checkpoints.
        patience: held-out losses without a new best after which training stops.
        seed: of the order of the windows.
        shares: of the neurons that each kind of text may touch.
        products: operands of matrix products, see ``products.with_products``.
        reads: what a layer's predictor reads, of ``predictor_data.READS``.
    """

    steps: int
    batch: int
    rate: float
    every: int
    patience: int
    seed: int
    shares: dict[str, float]
    products: str
    reads: str


class HeldOut(NamedTuple):
    """Figures on held-out text: means over the windows of each kind."""

    divergence: dict[str, float]
    share: dict[str, float]

    def line(self) -> str:
        """Return the figures as a line of text."""
        return " ".join(f"{k} {self.divergence[k]:.4f} at {100 * self.share[k]:.1f} %" for k in self.share)

    def loss(self, wanted: dict[str, float]) -> float:
        """Return the mean divergence, plus a nat for each share that is larger than wanted."""
        over = [max(0.0, value - wanted[kind]) for kind, value in self.share.items()]
        return float(np.mean(list(self.divergence.values())) + np.mean(over))


class Distilled(NamedTuple):
    """The trained weights of each layer, and figures of the training."""

    layers: list[Fitted]
    figures: dict[str, Any]


def window_order(windows: Windows, batch: int, step: int, seed: int) -> Int[np.ndarray, " B"]:
    """Return the windows of a step: kinds take turns, each in a new order whenever it is through."""
    kinds = windows.present()
    chosen = []
    for place in range(step * batch, (step + 1) * batch):
        turn, kind = divmod(place, len(kinds))
        rows = windows.rows(kinds[kind])
        epoch, at = divmod(turn, len(rows))
        chosen.append(rows[np.random.default_rng([seed, kind, epoch]).permutation(len(rows))[at]])
    return np.array(chosen)


def held_out(
    student: Student, weights: list[Weights], windows: Windows, outputs: np.ndarray, batch: int
) -> HeldOut:
    """Measure held-out windows, all of them (the last batch is filled with its first window)."""
    y = outputs.reshape(*windows.ids.shape, -1)
    found = np.zeros((2, len(windows.ids)))
    for at in range(0, len(windows.ids), batch):
        rows = np.arange(at, at + batch) % len(windows.ids)
        found[:, rows] = student.measure(weights, windows.ids[rows], y[rows])
    by_kind = [{kind: float(row[windows.rows(kind)].mean()) for kind in windows.present()} for row in found]
    return HeldOut(*by_kind)


def distil(
    model: LayeredModel,
    fitted: list[Fitted],
    input_scales: list[np.ndarray],
    cuts: Float[np.ndarray, " L"],
    *,
    train: tuple[Windows, np.ndarray],
    held: tuple[Windows, np.ndarray],
    settings: DistilSettings,
    folder: Path,
    tick: Callable[[int, str], object],
) -> Distilled:
    """Train all layers together, going on from the last checkpoint where there is one.

    Args:
        model: the dense model.
        fitted: each layer's predictor, trained alone or together before.
        input_scales: standard deviation of each layer's input, [D].
        cuts: each layer's threshold, with which training begins.
        train: windows, and what the dense model's output matrix reads there, float16 [N, D].
        held: the same of held-out text.
        settings: how.
        folder: for checkpoints; its older ones are removed.
        tick: called with the steps done since, and a line of figures.

    Raises:
        ValueError: the loss becomes NaN.
    """
    rank = max(len(part.fc1) for part in fitted)
    sizes = output_sizes(model, train[0])
    starts = [
        begin(f, s, float(c), rank, float(size))
        for f, s, c, size in zip(fitted, input_scales, cuts, sizes, strict=True)
    ]
    scales = [s for _, s in starts]
    student = Student(model, scales, settings.products, reads=settings.reads)
    batch = -(-settings.batch // len(jax.devices())) * len(jax.devices())
    y = train[1].reshape(*train[0].ids.shape, -1)
    optimiser = _optimiser(settings.rate, settings.steps)
    weights = jax.device_put([w for w, _ in starts], student.everywhere)
    moments = jax.device_put(optimiser.init(weights), student.everywhere)
    first = held_out(student, weights, *held, batch)
    price = Price({kind: settings.shares[kind] for kind in train[0].present()}, first.share)
    loss = first.loss(settings.shares)
    run = _Run(weights, moments, jax.tree.map(np.asarray, weights), loss, 0, 0, price.values)
    with Checkpoints(folder) as checkpoints:
        run = _restored(checkpoints, run, student)
        price.values = run.prices
        tick(run.step, first.line())
        while run.step < settings.steps and run.worse < settings.patience:
            rows = window_order(train[0], batch, run.step, settings.seed)
            kinds = [train[0].kinds[row] for row in rows]
            grads, found, share = student.gradient(
                run.weights, train[0].ids[rows], y[rows], price.of(kinds), run.step % STRIDE
            )
            if not np.isfinite(found).all():
                raise ValueError(
                    f"the loss is NaN at step {run.step}: give a smaller --distil-rate than {settings.rate:g}"
                )
            price.move(kinds, share)
            weights, moments = _update(optimiser, run.weights, run.moments, grads)
            run = run._replace(weights=weights, moments=moments, step=run.step + 1, prices=price.values)
            if run.step % settings.every and run.step < settings.steps:
                tick(1, f"divergence {found.mean():.4f} share {share.mean():.4f}")
                continue
            now = held_out(student, run.weights, *held, batch)
            loss = now.loss(settings.shares)
            better = loss < run.best_loss
            run = run._replace(worse=0 if better else run.worse + 1)
            if better:
                run = run._replace(best=jax.tree.map(np.asarray, run.weights), best_loss=loss)
            checkpoints.save(run.arrays(), run.step)
            tick(1, now.line())
    layers = [_fitted(w, s, part) for w, s, part in zip(run.best, scales, fitted, strict=True)]
    figures = {"steps": run.step, "first_loss": first.loss(settings.shares), "held_out_loss": run.best_loss}
    return Distilled(layers, figures)


class _Run(NamedTuple):
    """What a checkpoint holds."""

    weights: list[Weights]
    moments: Any
    best: list[Weights]
    best_loss: float
    worse: int
    step: int
    prices: np.ndarray

    def arrays(self) -> dict[str, Any]:
        content = self._asdict()
        content |= {name: jax.tree.leaves(content[name]) for name in ("weights", "moments", "best")}
        return content | {name: np.array(content[name]) for name in ("best_loss", "worse", "step")}


def _restored(checkpoints: Checkpoints, run: _Run, student: Student) -> _Run:
    saved = checkpoints.restore(run.arrays())

    def tree(name: str, like: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(like), [jnp.array(leaf) for leaf in saved[name]])

    return _Run(
        weights=jax.device_put(tree("weights", run.weights), student.everywhere),
        moments=jax.device_put(tree("moments", run.moments), student.everywhere),
        best=jax.tree.map(np.asarray, tree("best", run.best)),
        best_loss=float(saved["best_loss"]),
        worse=int(saved["worse"]),
        step=int(saved["step"]),
        prices=np.array(saved["prices"]),
    )


def _fitted(w: Weights, s: Scales, before: Fitted) -> Fitted:
    """Return a layer's weights as the file rounds them (rounding them again changes nothing), without the padding."""
    own, rank = stored(w, s, rounding=True), before.fc1.shape[0]
    fc1, fc1_bias, fc2, bias, rest, rest_bias = (np.asarray(a) for a in own)
    return Fitted(
        fc1[:rank], fc1_bias[:rank], fc2[:, :rank], bias, before.mean, before.figures, rest[:, :rank], rest_bias
    )  # fmt: skip


@lru_cache
def _optimiser(rate: float, steps: int) -> optax.GradientTransformation:
    """Return the same object for the same settings: compiled steps are found by it."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, min(20, steps // 4), steps, rate * 0.02)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0))


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _update(optimiser: Any, weights: Any, moments: Any, grads: Any) -> tuple[Any, Any]:
    changes, moments = optimiser.update(grads, moments, weights)
    return optax.apply_updates(weights, changes), moments
