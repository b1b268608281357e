"""Generated traces have the statistics of real ones, are repeatable, and can switch topic."""

from pathlib import Path

import numpy as np
import pytest

from kairox_jax.io.trace import Trace, read_trace
from kairox_jax.sim.generate import GeneratorSettings, fit, generate, hidden_parts, measure

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


def test_hidden_parts_are_those_of_the_trace() -> None:
    """Neurons fire as often as their chance says, from the rarest to the most frequent; of another seed they do not."""
    settings, errors = GeneratorSettings(popularity=1.5, drift=1.0, token=0.0), []
    active = unpack(make(settings, seed=1))
    for seed in (1, 2):
        parts = hidden_parts(settings, num_layers=2, num_neurons=1200, num_steps=64, seed=seed)
        log_odds = np.stack([p + settings.drift * d + settings.burst * b for p, d, b in parts])
        chance = 1 / (1 + np.exp(-log_odds))
        order, fired = np.argsort(chance, axis=None).reshape(10, -1), active.ravel()
        errors.append(max(abs(fired[tenth].mean() - chance.ravel()[tenth].mean()) for tenth in order))
    assert errors[0] < 0.01 < 0.2 < errors[1]


@pytest.mark.parametrize("change", [{"drift_decay": 1.0}, {"burst": -1.0}])
def test_bad_settings_are_refused(change: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        GeneratorSettings(**change)
