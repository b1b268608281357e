"""Generated traces have the statistics of real ones, are repeatable, and can switch topic."""

from pathlib import Path

import numpy as np
import pytest

from kairox_jax.io.trace import Trace, read_trace
from kairox_jax.sim.generate import GeneratorSettings, fit, generate, measure

DATA = Path(__file__).parents[1] / "data" / "traces"


def unpack(trace: Trace) -> np.ndarray:
    return np.stack([trace.active(step) for step in range(trace.num_steps)])


def make(settings: GeneratorSettings, steps: int = 64, seed: int = 1, switch_at: int | None = None) -> Trace:
    return generate(settings, num_layers=2, num_neurons=1200, num_steps=steps, seed=seed, switch_at=switch_at)


def test_measure_counts_pairs() -> None:
    active = np.zeros((4, 1, 2), bool)
    active[:, 0, 0] = [1, 1, 0, 1]
    shown = measure(active)
    assert shown.density == pytest.approx(3 / 8)
    assert shown.reactivation.tolist() == pytest.approx([1 / 2, 1 / 2])  # d = 1: 1 of 2; d = 2: 1 of 2
    assert shown.spread == pytest.approx(3 / 8) and shown.token_spread == pytest.approx(
        0.2165 / 0.375, rel=1e-3
    )


def test_defaults_resemble_the_real_traces() -> None:
    real = measure(unpack(read_trace(DATA / "smollm2-prose.npz")))
    made = measure(unpack(make(GeneratorSettings())))
    assert made.density == pytest.approx(real.density, rel=0.25)
    np.testing.assert_allclose(made.reactivation, real.reactivation, atol=0.08)
    assert (made.reactivation > made.density * 1.2).all()  # who was active is likelier to be active again


def test_fit_comes_closer() -> None:
    real = read_trace(DATA / "smollm2-code.npz")
    start = GeneratorSettings(bias=-3.0, popularity=0.2, drift=0.2)
    fitted = fit(real, start=start, trials=25)
    target = measure(unpack(real))
    assert measure(unpack(make(fitted))).distance(target) < 0.5 * measure(unpack(make(start))).distance(
        target
    )


def test_the_seed_decides() -> None:
    same = [make(GeneratorSettings(), 5, seed).packed for seed in (3, 3, 4)]
    assert (same[0] == same[1]).all() and not (same[0] == same[2]).all()


def test_a_switch_changes_who_is_popular() -> None:
    settings = GeneratorSettings(popularity=2.0, drift=0.1)
    stay, switched = (
        np.corrcoef(rows[:40].mean(0).ravel(), rows[40:].mean(0).ravel())[0, 1]
        for rows in (unpack(make(settings, 80, switch_at=at)) for at in (None, 40))
    )
    assert stay > 0.9 and switched < 0.65


@pytest.mark.parametrize("change", [{"drift_decay": 1.0}, {"burst": -1.0}])
def test_bad_settings_are_refused(change: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        GeneratorSettings(**change)
