"""Train one layer's predictor: its start by reduced-rank regression, AdamW, early stopping, checkpoints.

The loss is logistic, weighted by contribution: w softplus(-s) + softplus(s), least at s = log E[w | x], so the
score tells the expected contribution and one threshold on it is the best choice at any share.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from kairox_jax.models import Predictor
from training.predictor_data import decode_square

LARGEST_WEIGHT = 30.0  # contributions above this many times the unit count as this many: the tail is heavy
PROBE_TOKENS = 4096  # for the start and the input's mean and scale
RIDGE = 1e-3
OFFSET = 2.0  # hidden units start this many deviations above zero, where they are nearly linear


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """How a predictor is trained.

    Attributes:
        steps: the most steps.
        batch: tokens of a step; rounded up to a multiple of the devices.
        rate: AdamW's highest step size; warm-up, then cosine decay.
        every: steps between held-out losses, which are also the times of checkpoints.
        patience: held-out losses without a new best after which training stops.
        seed: of the order of the tokens.
    """

    steps: int
    batch: int
    rate: float
    every: int
    patience: int
    seed: int


class Start(NamedTuple):
    """A linear predictor of log contributions, and the input's statistics."""

    mean: Float[np.ndarray, " D"]
    scale: Float[np.ndarray, " D"]
    read: Float[np.ndarray, "D rank"]
    write: Float[np.ndarray, "rank F"]
    bias: Float[np.ndarray, " F"]
    gains: Float[np.ndarray, " rank"]


class Fitted(NamedTuple):
    """A trained predictor, for inputs with norm ``rms``; figures of its training; its estimate of the rest."""

    fc1: Float[np.ndarray, "R D"]
    fc1_bias: Float[np.ndarray, " R"]
    fc2: Float[np.ndarray, "F R"]
    bias: Float[np.ndarray, " F"]
    mean: Float[np.ndarray, " D"]
    figures: dict[str, Any]
    rest: Float[np.ndarray, "D R"] | None = None
    rest_bias: Float[np.ndarray, " D"] | None = None


def regress(x: Float[np.ndarray, "n D"], w: Float[np.ndarray, "n F"], most_rank: int) -> Start:
    """Fit log(1 + w) linearly in the standardised input, best for each rank (reduced-rank regression)."""
    mean, scale = x.mean(0), x.std(0) + 1e-6
    a, t = (x - mean) / scale, np.log1p(w)
    bias = t.mean(0)
    moment = a.T @ a
    moment[np.diag_indices(len(moment))] += RIDGE * np.trace(moment) / len(moment)
    value, vector = np.linalg.eigh(moment)
    root = np.sqrt(np.maximum(value, 1e-12))
    half = (vector / root).T @ (a.T @ (t - bias))  # [D, F], in the whitened basis
    energy, left = np.linalg.eigh(half @ half.T)
    order = np.argsort(energy)[::-1][: min(most_rank, len(energy))]
    left = left[:, order]
    read = (vector / root) @ left * np.sqrt(len(x))  # each projection has variance 1
    write = left.T @ half / np.sqrt(len(x))
    return Start(mean, scale, read, write, bias, np.maximum(energy[order], 0) / len(x))


def initial(start: Start, rank: int) -> Predictor:
    """Return the module that begins as the linear predictor, for standardised inputs."""
    dim, neurons = start.read.shape[0], start.write.shape[1]
    module = Predictor(dim, rank, neurons, norm="none", rngs=nnx.Rngs(0))
    read, write = start.read[:, :rank], start.write[:rank]
    have = read.shape[1]
    fc1, fc2 = np.zeros((rank, dim), np.float32), np.zeros((neurons, rank), np.float32)
    fc1[:have], fc2[:, :have] = read.T, write.T
    module.fc1, module.fc2 = nnx.Param(jnp.asarray(fc1)), nnx.Param(jnp.asarray(fc2))
    module.fc1_bias = nnx.Param(jnp.full((rank,), OFFSET, jnp.float32))
    module.bias = nnx.Param(jnp.asarray(start.bias - OFFSET * write.sum(0), jnp.float32))
    return module


def weighted_loss(score: Float[Array, "B F"], w: Float[Array, "B F"]) -> Float[Array, ""]:
    """Return the mean of w softplus(-s) + softplus(s)."""
    return jnp.mean((w + 1) * jax.nn.softplus(score) - w * score)


def fit_layer(
    x: np.ndarray,
    codes: np.ndarray,
    held_x: np.ndarray,
    held_codes: np.ndarray,
    *,
    unit: Float[np.ndarray, " F"],
    start: Start,
    rank: int,
    layer: int,
    settings: FitSettings,
    folder: Path,
    tick: Callable[[int, float], object],
) -> Fitted:
    """Train one layer, going on from its last checkpoint where there is one.

    Args:
        x: normalised inputs, float16 [N, D].
        codes: codes of |z|, uint8 [N, F].
        held_x: the same of held-out text.
        held_codes: the same of held-out text.
        unit: a neuron's weight over the unit of contributions: w = z^2 unit.
        start: where training begins.
        rank: R.
        layer: of the model; goes into the order of the tokens.
        settings: how.
        folder: for checkpoints; its older ones are removed.
        tick: called with the steps done since and the last training loss.

    Raises:
        ValueError: the loss becomes NaN, or there are fewer tokens than a batch.
    """
    mesh = Mesh(np.array(jax.devices()), ("data",))
    devices = len(jax.devices())
    batch = -(-settings.batch // devices) * devices
    if len(x) < batch:
        raise ValueError(
            f"{len(x)} training tokens are fewer than a batch of {batch}: give more text, or a smaller --fit-batch"
        )
    by_row, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    facts = jax.device_put([jnp.asarray(a, jnp.float32) for a in (unit, start.mean, start.scale)], everywhere)
    graph, state = nnx.split(initial(start, rank))
    leaves, tree = jax.tree.flatten(state)
    optimiser = _optimiser(settings.rate, settings.steps)
    held = [jax.device_put(a[: len(a) // devices * devices], by_row) for a in (held_x, held_codes)]
    # Copies: the leaves are donated, and the best ones are kept on the host.
    leaves = [jax.device_put(jnp.array(leaf), everywhere) for leaf in leaves]
    moments = jax.device_put(optimiser.init(leaves), everywhere)
    first = float(_held_loss(graph, tree, leaves, facts, *held))
    saved = {
        "leaves": leaves,
        "moments": jax.tree.leaves(moments),
        "best": [np.asarray(leaf).copy() for leaf in leaves],
        "best_loss": np.array(first),
        "worse": np.array(0),
        "step": np.array(0),
    }
    with Checkpoints(folder) as checkpoints:
        saved = checkpoints.restore(saved)
        step, tree_m = int(saved["step"]), jax.tree.structure(moments)
        leaves = [jax.device_put(jnp.array(leaf), everywhere) for leaf in saved["leaves"]]
        moments = jax.tree.unflatten(
            tree_m, [jax.device_put(jnp.array(leaf), everywhere) for leaf in saved["moments"]]
        )
        best, best_loss, worse = saved["best"], float(saved["best_loss"]), int(saved["worse"])
        tick(step, first)
        while step < settings.steps and worse < settings.patience:
            rows = _rows(len(x), batch, step, [settings.seed, layer])
            pieces = [jax.device_put(a[rows], by_row) for a in (x, codes)]
            leaves, moments, loss = _update(graph, tree, optimiser, leaves, moments, facts, *pieces)
            step += 1
            if step % settings.every == 0 or step == settings.steps:
                now = float(_held_loss(graph, tree, leaves, facts, *held))
                if not np.isfinite(now):
                    raise ValueError(
                        f"the loss of layer {layer} is NaN at step {step}: give a smaller --rate than {settings.rate}"
                    )
                worse = 0 if now < best_loss else worse + 1
                if now < best_loss:
                    best, best_loss = [np.asarray(leaf).copy() for leaf in leaves], now
                checkpoints.save(
                    {
                        "leaves": leaves,
                        "moments": jax.tree.leaves(moments),
                        "best": best,
                        "best_loss": np.array(best_loss),
                        "worse": np.array(worse),
                        "step": np.array(step),
                    },
                    step,
                )
                tick(settings.every, float(loss))
    figures = {"steps": step, "first_loss": first, "held_out_loss": best_loss, "rank": rank}
    parts = nnx.merge(graph, jax.tree.unflatten(tree, best))
    return _fold(parts, start, figures)


@lru_cache
def _optimiser(rate: float, steps: int) -> optax.GradientTransformation:
    """Return the same object for the same settings: compiled steps are found by it."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, min(30, steps // 4), steps, rate * 0.02)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-3))


def _loss(graph: Any, tree: Any, leaves: list[Array], facts: list[Array], x: Array, codes: Array) -> Array:
    unit, mean, scale = facts
    module = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
    w = jnp.minimum(decode_square(codes) * unit[None], LARGEST_WEIGHT)
    return weighted_loss(module((x.astype(jnp.float32) - mean[None]) / scale[None]), w)


_held_loss = jax.jit(_loss, static_argnums=(0, 1))


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(3, 4))
def _update(
    graph: Any, tree: Any, optimiser: Any, leaves: list[Array], moments: Any, facts: list[Array], x: Array, codes: Array
) -> tuple[list[Array], Any, Array]:  # fmt: skip
    loss, grads = jax.value_and_grad(_loss, argnums=2)(graph, tree, leaves, facts, x, codes)
    changes, moments = optimiser.update(grads, moments, leaves)
    return optax.apply_updates(leaves, changes), moments, loss  # type: ignore[return-value]


def _rows(num: int, batch: int, step: int, seed: list[int]) -> np.ndarray:
    """Return the tokens of a step, from a new order in each epoch; rising, as the file is read."""
    per_epoch = num // batch
    epoch, place = divmod(step, per_epoch)
    order = np.random.default_rng([*seed, epoch]).permutation(num)
    return np.sort(order[place * batch : (place + 1) * batch])


def _fold(module: Predictor, start: Start, figures: dict[str, Any]) -> Fitted:
    """Take the standardisation into the first matrix."""
    fc1 = np.asarray(module.fc1[...]) / start.scale
    fc1_bias = np.asarray(module.fc1_bias[...]) - fc1 @ start.mean
    fc2, bias = np.asarray(module.fc2[...]), np.asarray(module.bias[...])
    return Fitted(fc1, fc1_bias, fc2, bias, np.asarray(start.mean), figures)


class Checkpoints:
    """The last Orbax checkpoint of a layer; a half-written one is never taken for one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._checkpointer = ocp.StandardCheckpointer()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    def _steps(self) -> list[int]:
        names = [path.name for path in self.folder.glob("step-*")]
        return sorted(int(name[5:]) for name in names if name[5:].isdigit())

    def restore(self, like: dict[str, Any]) -> dict[str, Any]:
        """Return the last checkpoint, or ``like`` itself where there is none."""
        steps = self._steps()
        return self._checkpointer.restore(self.folder / f"step-{steps[-1]}", like) if steps else like

    def save(self, content: dict[str, Any], step: int) -> None:
        """Write a checkpoint, then remove the older ones."""
        older = self._steps()
        self._checkpointer.save(self.folder / f"step-{step}", content)
        self._checkpointer.wait_until_finished()
        for other in older:
            shutil.rmtree(self.folder / f"step-{other}")
