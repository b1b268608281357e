"""exp against NumPy float64."""

import numba
import numpy as np
import pytest

from kairox_jax.host.exponential import exp


@numba.njit
def _all(values, out):
    for i in range(len(values)):
        out[i] = exp(values[i])


def all_of(values):
    out = np.empty(len(values), np.float32)
    _all(np.asarray(values, np.float32), out)
    return out


def test_against_float64():
    x = np.concatenate([np.linspace(-87, 87, 20_001), np.linspace(-1, 1, 20_001), [0.0, -0.0]]).astype(
        np.float32
    )
    want = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(all_of(x), want, rtol=3e-7)
    assert all_of([0.0])[0] == 1.0


@pytest.mark.parametrize(("x", "least", "most"), [(-1e30, 0, 1e-37), (-np.inf, 0, 1e-37), (1e30, 1e37, 1e38)])
def test_beyond_its_range(x, least, most):
    assert least <= all_of([x])[0] <= most


def test_nan_stays():
    assert np.isnan(all_of([np.nan])[0])
