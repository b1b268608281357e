"""Logits layer by layer: those of another implementation; the active share counted in NumPy."""

from pathlib import Path

import numpy as np
import pytest

from kairox_jax.io import open_checkpoint
from kairox_jax.models import streamed_logits

MODELS = Path(__file__).parents[1] / "data/models"
TOLERANCE = 2e-4  # of the largest |logit|


@pytest.mark.parametrize("name", ["relu-llama", "opt", "relu-falcon", "falcon-serial-bias", "sparse-qwen2"])
def test_logits(name: str) -> None:
    with np.load(MODELS / name / "expected.npz") as file:
        ids, want = file["input_ids"], file["logits"]
    steps: list[None] = []
    got, share = streamed_logits(open_checkpoint(MODELS / name), ids, progress=lambda: steps.append(None))
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()
    assert 0.1 < share < 0.9 and len(steps) == open_checkpoint(MODELS / name).config.num_layers


def test_the_share_of_active_neurons() -> None:
    source = open_checkpoint(MODELS / "llama3-rope")
    ids = np.arange(6)[None]
    every, _ = streamed_logits(source, ids)
    none, share = streamed_logits(source, ids, thresholds=np.full(source.config.num_layers, 1e9, np.float32))
    assert share == 0 and np.abs(none - every).max() > 0
    # The first layer's share by hand: |silu(g) u| over the threshold.
    layer_only = np.full(source.config.num_layers, 1e9, np.float32)
    layer_only[0] = 0.001
    _, share = streamed_logits(source, ids, thresholds=layer_only)
    assert 0 < share <= 1 / source.config.num_layers
