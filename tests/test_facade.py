"""The names of `import kairox_jax`, which load late."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kairox_jax

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "tests/data/models"


def test_importing_the_package_or_the_command_line_does_not_load_jax() -> None:
    code = (
        "import sys, kairox_jax, kairox_jax.cli\n"
        "kairox_jax.GenerationConfig, kairox_jax.PlacementConfig, kairox_jax.ModelConfig, dir(kairox_jax)\n"
        "assert not {'jax', 'flax', 'numba'} & set(sys.modules), 'loaded too early'\n"
        "assert callable(kairox_jax.load_model) and 'jax' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_name_is_there_and_is_the_original() -> None:
    from kairox_jax import config, engine, models

    assert {name for name in kairox_jax.__all__ if getattr(kairox_jax, name) is None} == set()
    assert kairox_jax.Engine is engine.Engine
    assert kairox_jax.load_model is models.load_model
    assert kairox_jax.ModelConfig is config.ModelConfig
    assert set(kairox_jax.__all__) <= set(dir(kairox_jax))
    with pytest.raises(AttributeError, match="has no attribute 'load_modle'"):
        _ = kairox_jax.load_modle


def test_the_version_is_the_package_s() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert kairox_jax.__version__ == project["version"]


def test_load_tokenizer(default_model: Path) -> None:
    tokenizer = kairox_jax.load_tokenizer(default_model)
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]


def test_load_tokenizer_of_an_unknown_name() -> None:
    with pytest.raises(ValueError, match="no-such-model"):
        kairox_jax.load_tokenizer("no-such-model")
