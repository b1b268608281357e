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
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from training.forward import LayeredModel, embed
from training.predictor_data import block_parts
from training.predictor_fit import Checkpoints, Fitted
from training.predictor_student import Scales, Weights, begin, divergence, stored, student_layer
from training.products import with_products
from training.texts import Windows

STRIDE = 4  # every so many positions enter the divergence: the output matrix would take most of the time
LATELY = 0.2  # weight of a step in the share that was touched lately
START_PRICE = 0.8  # nats for all neurons instead of none; about what the loss pays near half
PRICE_RATE = 0.2  # by which the price moves each step, times the share that is too large
STIFFNESS = 30.0  # what is added to the price, times the share that is too large: it damps the price's swings


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
        share: of the neurons that each kind of text may touch.
        products: operands of matrix products, see ``products.with_products``.
    """

    steps: int
    batch: int
    rate: float
    every: int
    patience: int
    seed: int
    share: float
    products: str


class HeldOut(NamedTuple):
    """Figures on held-out text: means over the windows of each kind."""

    divergence: dict[str, float]
    share: dict[str, float]

    def line(self) -> str:
        """Return the figures as a line of text."""
        return " ".join(f"{k} {self.divergence[k]:.4f} at {100 * self.share[k]:.1f} %" for k in self.share)

    def loss(self, share: float) -> float:
        """Return the mean divergence, plus a nat for each share that is too large."""
        over = [max(0.0, value - share) for value in self.share.values()]
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


class Student:
    """The compiled functions of a model with predictors, and its arrays on all devices."""

    def __init__(self, model: LayeredModel, scales: list[Scales], settings: DistilSettings) -> None:
        self.eps, self.settings = model.config.norm_eps, settings
        mesh = Mesh(np.array(jax.devices()), ("data",))
        self.by_row, self.everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
        put = partial(jax.device_put, device=self.everywhere)
        low = jnp.bfloat16 if settings.products == "bfloat16" else jnp.float32
        self.scales = [put(s) for s in scales]
        self.layers = [
            put(jax.tree.map(lambda a: a.astype(low) if a.ndim == 2 else a, state)) for state in model.layers
        ]
        self.embed, self.head = put(model.embed), put(model.head._replace(table=model.head.table.astype(low)))
        layer = partial(student_layer, model.graph, rounding=True)
        self._plain = jax.jit(with_products(layer, settings.products))

        def ahead(state: Any, w: Weights, s: Scales, x: Array, before: Array | None) -> Any:
            rounded = with_products(layer, settings.products)
            return jax.vjp(lambda w, x, before: rounded(state, w, s, x, before), w, x, before)

        self._ahead = jax.jit(ahead)
        self._back = jax.jit(lambda pull, out: pull(out))
        self._head = jax.jit(partial(_head_loss, self.eps, settings.products))
        self._head_grad = jax.jit(
            jax.value_and_grad(partial(_head_loss, self.eps, settings.products), argnums=2, has_aux=True)
        )

    def put(self, rows: np.ndarray) -> Array:
        """Return an array shared out by windows."""
        return jax.device_put(rows, self.by_row)

    def gradient(
        self,
        weights: list[Weights],
        ids: np.ndarray,
        y: np.ndarray,
        prices: Float[np.ndarray, " B"],
        offset: int,
    ) -> tuple[list[Weights], np.ndarray, np.ndarray]:
        """Return the gradient of mean(divergence + price * share), each window's divergence, and its share."""
        x, before, pulls, shares = self.embed[self.put(ids)], None, [], []
        for state, w, s in zip(self.layers, weights, self.scales, strict=True):
            (x, before, share), pull = self._ahead(state, w, s, x, before)
            pulls.append(pull)
            shares.append(share)
        (_, found), grad = self._head_grad(self.head, self.put(y[:, offset::STRIDE]), x[:, offset::STRIDE])
        grad_x = jnp.zeros_like(x).at[:, offset::STRIDE].set(grad)
        grad_after = jnp.zeros_like(x)
        price = self.put((prices / len(prices) / len(pulls)).astype(np.float32))
        grads: list[Weights] = []
        for pull in reversed(pulls):
            own, grad_x, grad_after = self._back(pull, (grad_x, grad_after, price))
            grads.append(own)
        return grads[::-1], np.asarray(found), np.mean(jax.device_get(shares), axis=0)

    def measure(
        self, weights: list[Weights], ids: np.ndarray, y: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each window's divergence and share."""
        x, before, shares = self.embed[self.put(ids)], None, []
        for state, w, s in zip(self.layers, weights, self.scales, strict=True):
            x, before, share = self._plain(state, w, s, x, before)
            shares.append(share)
        _, found = self._head(self.head, self.put(y[:, ::STRIDE]), x[:, ::STRIDE])
        return np.asarray(found), np.mean(jax.device_get(shares), axis=0)


def _head_loss(eps: float, products: str, head: Any, y: Array, x: Array) -> tuple[Array, Array]:
    """Return the mean divergence, and each window's."""
    flat = [a.astype(jnp.float32).reshape(-1, a.shape[-1]) for a in (y, x)]
    found = divergence(eps, head, *flat, products=products).reshape(x.shape[:2]).mean(1)
    return found.mean(), found


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
        fitted: each layer's predictor, trained alone.
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
    starts = [begin(f, s, float(c), rank) for f, s, c in zip(fitted, input_scales, cuts, strict=True)]
    scales = [s._replace(output=jnp.float32(size)) for (_, s), size in zip(starts, sizes, strict=True)]
    student = Student(model, scales, settings)
    batch = -(-settings.batch // len(jax.devices())) * len(jax.devices())
    y = train[1].reshape(*train[0].ids.shape, -1)
    optimiser = _optimiser(settings.rate, settings.steps)
    weights = jax.device_put([w for w, _ in starts], student.everywhere)
    moments = jax.device_put(optimiser.init(weights), student.everywhere)
    first = held_out(student, weights, *held, batch)
    price = Price.start(train[0].present(), first.share, settings.share)
    run = _Run(
        weights, moments, jax.tree.map(np.asarray, weights), first.loss(settings.share), 0, 0, price.values
    )
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
            loss = now.loss(settings.share)
            better = loss < run.best_loss
            run = run._replace(worse=0 if better else run.worse + 1)
            if better:
                run = run._replace(best=jax.tree.map(np.asarray, run.weights), best_loss=loss)
            checkpoints.save(run.arrays(), run.step)
            tick(1, now.line())
    layers = [_fitted(w, s, part) for w, s, part in zip(run.best, scales, fitted, strict=True)]
    figures = {"steps": run.step, "first_loss": first.loss(settings.share), "held_out_loss": run.best_loss}
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


class Price:
    """The price of a touched neuron for each kind of text, moved until the kind touches the wanted share.

    Attributes:
        values: price and lately touched share of each kind, [2, K].
    """

    def __init__(self, kinds: list[str], share: float, values: np.ndarray) -> None:
        self.kinds, self.share, self.values = kinds, share, values

    @classmethod
    def start(cls, kinds: list[str], shares: dict[str, float], share: float) -> Price:
        """Return the first prices."""
        return cls(
            kinds, share, np.array([[START_PRICE] * len(kinds), [shares.get(k, share) for k in kinds]])
        )

    def of(self, kinds: list[str]) -> Float[np.ndarray, " B"]:
        """Return the price of each window; below zero where less than the share is touched."""
        paid = self.values[0] + STIFFNESS * (self.values[1] - self.share)
        return np.array([paid[self.kinds.index(kind)] for kind in kinds])

    def move(self, kinds: list[str], shares: Float[np.ndarray, " B"]) -> None:
        """Take note of the shares that the windows of a step touched."""
        self.values = self.values.copy()
        for kind, share in zip(kinds, shares, strict=True):
            at = self.kinds.index(kind)
            self.values[0, at] += PRICE_RATE * (share - self.share)
            self.values[1, at] += LATELY * (share - self.values[1, at])


def output_sizes(model: LayeredModel, windows: Windows) -> Float[np.ndarray, " L"]:
    """Return the mean size of an element of each FFN's output, over a window; its first token is unlike all others."""
    x, sizes = embed(model, windows.ids[:1]), []
    for state in model.layers:
        x, size = _output_size(model.graph, state, x)
        sizes.append(float(size))
    return np.array(sizes)


@partial(jax.jit, static_argnums=0)
def _output_size(graph: Any, state: Any, x: Array) -> tuple[Array, Array]:
    after, _, x = block_parts(nnx.merge(graph, state), x)
    return x, jnp.abs(x - after)[:, 1:].mean()


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
