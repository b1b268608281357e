"""Activation rules against NumPy float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kairox_jax.config import ACTIVATIONS
from kairox_jax.models import neuron_values

# Multiples of 1/16 have exact products, so that masks at the boundary can be compared.
VALUES = st.integers(-64, 64).map(lambda i: i / 16)
PAIRS = hnp.arrays(np.float64, (2, 3, 5), elements=VALUES)


def expected(gate: np.ndarray | None, up: np.ndarray, rule: str, threshold: float | None) -> tuple:
    driver = up if gate is None else gate
    factor = np.ones_like(up) if gate is None else up
    if rule == "silu":
        z = driver / (1 + np.exp(-driver)) * factor
        if threshold is None:
            return z, z == z
        size = np.interp(np.abs(z), [threshold, threshold * 1.5, 1e9], [0, threshold * 1.5, 1e9])
        return np.copysign(size, z), np.abs(z) > threshold
    if rule == "relu":
        return np.maximum(driver, 0) * factor, driver > 0
    if rule == "relu2":
        return np.maximum(driver, 0) ** 2 * factor, driver > 0
    if rule == "fatrelu":
        mask = driver > (threshold or 0)
        return np.where(mask, driver, 0) * factor, mask
    mask = (driver > 0) & (factor > 0)
    return np.maximum(driver, 0) * np.maximum(factor, 0), mask


@pytest.mark.parametrize("rule", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
@settings(max_examples=25, deadline=None)
@given(pair=PAIRS, threshold=st.sampled_from([None, 0.25, 1.03]))
def test_values_and_masks(rule: str, gated: bool, pair: np.ndarray, threshold: float | None) -> None:
    if rule == "drelu" and not gated:
        return
    gate, up = (pair[0] if gated else None), pair[1]
    as_float32 = [None if a is None else a.astype(np.float32) for a in (gate, up)]
    z, active = neuron_values(*as_float32, rule, threshold)
    want, mask = expected(gate, up, rule, threshold)
    np.testing.assert_array_equal(active, mask)
    np.testing.assert_allclose(z, want, rtol=1e-5, atol=1e-6)


def test_silu_values_are_continuous_at_their_threshold() -> None:
    """Rounding must not decide whether a neuron counts: placements would give different text."""
    up = np.linspace(0.9, 1.2, 100_001, dtype=np.float32)
    z, active = neuron_values(np.ones_like(up), up, "silu", 0.75)
    assert 0 < np.count_nonzero(active) < len(up)
    whole = up / (1 + np.exp(-1))
    # a step would jump by 0.75; the ramp is 3 times as steep as the values
    assert np.abs(np.diff(z)).max() < 4 * np.diff(whole).max()


@pytest.mark.parametrize("threshold", [0.0, -1.0])
def test_a_threshold_that_all_exceed_changes_nothing(threshold: float) -> None:
    pair = np.random.default_rng(0).normal(size=(2, 1000)).astype(np.float32)
    whole, _ = neuron_values(*pair, "silu", None)
    z, active = neuron_values(*pair, "silu", threshold)
    assert np.asarray(active).all()
    np.testing.assert_array_equal(z, whole)


def test_refusals() -> None:
    up = np.ones((1, 2), np.float32)
    with pytest.raises(ValueError, match="'drelu' needs a gated FFN"):
        neuron_values(None, up, "drelu", None)
    with pytest.raises(ValueError, match="'gelu' is unknown: choose one of silu"):
        neuron_values(up, up, "gelu", None)
