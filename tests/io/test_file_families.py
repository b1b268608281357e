"""Every family's checkpoint, as imported, computes what another implementation computed from it."""

from pathlib import Path

import numpy as np
import pytest
from numpy_reference import forward

from kairox_jax.io import FormatError, open_checkpoint

MODELS = Path(__file__).parents[1] / "data/models"
FAMILIES = sorted(path.parent.name for path in MODELS.glob("*/expected.npz"))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits(name: str) -> None:
    checkpoint = open_checkpoint(MODELS / name)
    with np.load(MODELS / name / "expected.npz") as expected:
        ids, want = expected["input_ids"], expected["logits"]
    got = forward(checkpoint, ids)
    assert np.abs(got - want).max() <= 2e-4 * np.abs(want).max()


def test_all_families_are_there() -> None:
    assert len(FAMILIES) == 17


def test_mixtral_is_refused() -> None:
    with pytest.raises(FormatError, match="'mixtral': mixtures of experts are not supported yet"):
        open_checkpoint(MODELS / "mixtral-relu")
