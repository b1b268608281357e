"""Settings of all tests: strict JAX, seeded randomness, and the default model where it can be had."""

import os
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from kairox_jax.io import FetchError, resolve_model

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    """Compile each program once: engines of the same shapes, here and in started processes, share the result."""
    cache: pytest.Cache | None = getattr(config, "cache", None)  # absent with -p no:cacheprovider
    folder = cache.mkdir("jax-programs") if cache else Path(tempfile.mkdtemp(prefix="jax-programs-"))
    if not cache:
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    settings = {"compilation_cache_dir": str(folder), "persistent_cache_min_compile_time_secs": 0.0}
    for name, value in settings.items():
        os.environ[f"JAX_{name.upper()}"] = str(value)
        jax.config.update(f"jax_{name}", value)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's name."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file; skips with the reason where it cannot be had, unless it is required."""
    try:
        return resolve_model("smollm2-135m", progress=False)
    except FetchError as error:
        if os.environ.get("KAIROX_REQUIRE_MODEL") == "1":
            pytest.fail(f"the default model is required: {error}")
        pytest.skip(f"the default model cannot be had: {error}")
