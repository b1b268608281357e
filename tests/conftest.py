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
# The files that take longest begin first: no process then waits at the end for another's.
LONGEST = (
    "engine/test_engine_model.py",
    "host/test_kernels.py",
    "host/test_columns.py",
    "host/test_callback.py",
    "engine/test_jitted_hybrid.py",
    "host/test_host_attention.py",
    "training/test_train_predictors.py",
    "engine/test_prefill.py",
    "models/test_model_families.py",
    "engine/test_predicted.py",
    "engine/test_families.py",
    "host/test_integers.py",
    "engine/test_engine.py",
    "engine/test_batch.py",
)
FOLDER = Path(__file__).parent


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and leave the order of the others."""
    ranks = {FOLDER / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


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
