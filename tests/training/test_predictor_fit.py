"""One layer's training: it learns, and a run that is killed between two checkpoints ends in the same place."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from training.predictor_data import decode_square, encode_size
from training.predictor_fit import FitSettings, Fitted, fit_layer, regress

D, F, N = 16, 24, 256


def test_a_killed_layer_ends_in_the_same_place(rng: np.random.Generator, tmp_path: Path) -> None:
    x = rng.normal(size=(N, D)).astype(np.float16)
    z = np.maximum(x @ rng.normal(size=(D, F)), 0)
    codes = np.asarray(encode_size(jnp.asarray(z, jnp.float32)))
    start = regress(x.astype(np.float32), np.asarray(decode_square(jnp.asarray(codes))), 32)
    settings = FitSettings(steps=20, batch=32, rate=3e-3, every=5, patience=9, seed=0)

    def fit(folder: str, tick: Any) -> Fitted:
        return fit_layer(
            x, codes, x[:64], codes[:64], unit=np.ones(F), start=start, rank=32, layer=0, settings=settings,
            folder=tmp_path / folder, tick=tick,
        )  # fmt: skip

    whole = fit("a", lambda steps, loss: None)
    assert whole.figures["held_out_loss"] < whole.figures["first_loss"]
    calls: list[int] = []

    def tick(steps: int, loss: float) -> None:
        calls.append(steps)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit("b", tick)
    again: list[int] = []
    resumed = fit("b", lambda steps, loss: again.append(steps))
    assert again == [10, 5, 5]
    np.testing.assert_allclose(resumed.fc2, whole.fc2, atol=1e-6)
    assert resumed.figures == whole.figures
