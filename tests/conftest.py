"""Settings of all tests: strict JAX, seeded randomness, and the default model where it can be had."""

import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's name."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
