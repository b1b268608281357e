"""Training all layers together: exact gradients, the wanted share, and a killed run that ends in the same place."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kairox_jax.models import Decoder, normalise
from training.forward import LayeredModel, layered
from training.predictor_data import READS, block_parts
from training.predictor_distil import Distilled, DistilSettings, distil, window_order
from training.predictor_fit import Fitted
from training.predictor_price import Price
from training.predictor_step import STRIDE, Student
from training.predictor_student import begin, divergence, student_layer
from training.sources import KINDS
from training.texts import Windows

D, F, RANK = 16, 40, 32


def settings(**changes: Any) -> DistilSettings:
    values: dict[str, Any] = {
        "steps": 12, "batch": 2, "rate": 5e-3, "every": 4, "patience": 9, "seed": 0,
        "shares": dict.fromkeys(KINDS, 0.5), "products": "float32", "reads": "adjacent",
    }  # fmt: skip
    return DistilSettings(**values | changes)


def fitted_of(rng: np.random.Generator) -> list[Fitted]:
    shapes = ((RANK, D), (RANK,), (F, RANK), (F,), (D,))
    drawn = [[0.3 * rng.normal(size=shape) for shape in shapes] for _ in range(3)]
    return [Fitted(*(a.astype(np.float32) for a in arrays), {"rank": RANK}) for arrays in drawn]  # type: ignore[arg-type]


def outputs_of(model: LayeredModel, windows: Windows) -> np.ndarray:
    from flax import nnx

    x = model.embed[windows.ids]
    for state in model.layers:
        x = block_parts(nnx.merge(model.graph, state), x)[2]
    y = normalise(x, model.head.norm, None, model.config.norm_eps)
    return np.asarray(y).reshape(-1, D).astype(np.float16)


def train(decoder: Decoder, windows: Windows, folder: Path, tick: Any, **changes: Any) -> Distilled:
    model = layered(decoder)
    split = (windows, outputs_of(model, windows))
    fitted = fitted_of(np.random.default_rng(2))
    scales = [np.ones(D, np.float32)] * 3
    return distil(
        model, fitted, scales, np.zeros(3), train=split, held=split, settings=settings(**changes), folder=folder,
        tick=tick,
    )  # fmt: skip


@pytest.mark.parametrize("reads", READS)
def test_the_gradient_is_that_of_the_whole_function(
    reads: str, rng: np.random.Generator, decoder: Decoder, windows: Windows
) -> None:
    model, y = layered(decoder), outputs_of(layered(decoder), windows).reshape(5, 12, D)
    parts = [begin(part, np.ones(D, np.float32), 0.1, RANK, 1.0) for part in fitted_of(rng)]
    weights, scales = [w for w, _ in parts], [s for _, s in parts]
    prices, rows = np.array([0.5, 2.0]), [1, 3]

    def whole(weights: Any) -> jax.Array:
        x, before, total = model.embed[windows.ids[rows]], None, jnp.float32(0)
        for state, w, s in zip(model.layers, weights, scales, strict=True):
            x, after, share = student_layer(model.graph, state, w, s, x, before, rounding=True)
            before = after if reads == "adjacent" else None
            total += (share * jnp.asarray(prices, jnp.float32)).mean() / 3
        pair = [jnp.asarray(a[:, 1::STRIDE], jnp.float32).reshape(-1, D) for a in (y[rows], x)]
        return total + divergence(model.config.norm_eps, model.head, *pair, products="float32").mean()

    want = jax.jit(jax.grad(whole))(weights)
    got, found, share = Student(model, scales, "float32", reads=reads).gradient(
        weights, windows.ids[rows], y[rows], prices, 1
    )
    assert found.shape == share.shape == (2,) and (0 < share).all() and (share < 1).all()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max() + 1e-9)
    assert all(np.abs(w.rest).max() > 0 for w in want)


@pytest.mark.slow
def test_a_killed_run_ends_in_the_same_place(decoder: Decoder, windows: Windows, tmp_path: Path) -> None:
    lines: list[str] = []
    whole = train(decoder, windows, tmp_path / "a", lambda n, line: lines.append(line))
    assert whole.figures["held_out_loss"] < whole.figures["first_loss"] and whole.figures["steps"] == 12
    assert "prose" in lines[0] and "json" in lines[-1] and len(lines) == 13
    seen = []

    def tick(steps: int, line: str) -> None:
        seen.append(steps)
        if len(seen) == 8:  # the last checkpoint is at step 4
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(decoder, windows, tmp_path / "b", tick)
    assert [path.name for path in (tmp_path / "b").glob("step-*")] == ["step-4"]
    done: list[int] = []
    again = train(decoder, windows, tmp_path / "b", lambda n, line: done.append(n))
    assert done == [4] + [1] * 8
    assert again.figures["held_out_loss"] == pytest.approx(whole.figures["held_out_loss"], abs=1e-6)
    for one, other in zip(again.layers, whole.layers, strict=True):
        for name in ("fc1", "fc2", "bias", "rest", "rest_bias"):
            np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=1e-6)


def test_each_kind_reaches_its_share(decoder: Decoder, windows: Windows, tmp_path: Path) -> None:
    wanted = {"prose": 0.36, "json": 0.28}
    lines: list[str] = []
    tick = lambda n, line: lines.append(line)  # noqa: E731
    train(decoder, windows, tmp_path, tick, steps=120, every=120, shares=wanted)

    def shares(line: str) -> list[float]:
        return [float(part) for part in line.split()[3::5]]

    assert min(shares(lines[0])) > 40
    assert shares(lines[-1]) == pytest.approx([36, 28], abs=3.5), lines[-1]


def test_a_price_rises_where_too_much_is_touched() -> None:
    price = Price({"prose": 0.6, "json": 0.4}, {"prose": 0.7, "json": 0.3})
    first = price.of(["prose", "json"])
    assert first[0] > 0 > first[1]
    price.move(["prose", "prose"], np.array([0.8, 0.8]))
    after = price.of(["prose", "json"])
    assert after[0] > first[0] and after[1] == first[1]


def test_kinds_take_turns_and_every_window_its_own(windows: Windows) -> None:
    steps = [window_order(windows, 2, step, 1) for step in range(6)]
    assert all(windows.kinds[a] == "prose" and windows.kinds[b] == "json" for a, b in steps)
    assert sorted(int(b) for _, b in steps[:3]) == sorted(int(b) for _, b in steps[3:]) == [2, 3, 4]
    assert [list(window_order(windows, 2, step, 1)) for step in range(6)] == [list(s) for s in steps]


def test_a_loss_that_is_no_number_is_told(decoder: Decoder, windows: Windows, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"the loss is NaN at step \d+: give a smaller --distil-rate than 1e\+30"
    ):
        train(decoder, windows, tmp_path, lambda n, line: None, rate=1e30)
