"""Checkpoints that transformers just built, loaded here, against the logits that it computed from them."""

import os
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from kairox_jax import load_model
from kairox_jax.models import Decoder

CALL = nnx.jit(Decoder.__call__)
CASES = [
    "opt",
    "opt-f16",
    "llama-relu",
    "llama-relu-old",
    "llama-linear-tied",
    "llama-llama3",
    "mistral-relu",
]
CASES += ["qwen2-relu", "qwen2-relu-tied", "falcon-old", "falcon-old-keys", "falcon-old-serial"]
CASES += ["falcon-new", "falcon-new-one-norm"]


@pytest.fixture(scope="module")
def folder() -> Path:
    """The folder of a run of ``build_cases.py``; once it is named, whatever is missing there fails."""
    given = os.environ.get("KAIROX_PARITY")
    if not given:
        pytest.skip("KAIROX_PARITY names no folder: `make parity` builds the checkpoints and sets it")
    return Path(given)


@pytest.mark.parametrize("mode", ["dense", "exact"])
@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, mode: str, folder: Path) -> None:
    with np.load(folder / name / "expected.npz") as expected:
        ids, want = expected["input_ids"], expected["logits"]
    got = np.asarray(CALL(load_model(folder / name, mode), ids))
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 2e-4 * np.abs(want).max()


def test_every_case_is_compared(folder: Path) -> None:
    assert sorted(path.parent.name for path in folder.glob("*/expected.npz")) == sorted(CASES)
