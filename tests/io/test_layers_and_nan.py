"""Weights that a config does not name, and packed rows that are not finite."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from kairox_jax.io import FormatError, open_checkpoint
from kairox_jax.io.weights import check_packed
from kairox_jax.quant import PackedRows

MODELS = Path(__file__).parents[1] / "data" / "models"


def test_layers_beyond_the_config_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "relu-llama", folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="belongs to a layer beyond the"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "block", "place"), [("q8_0", 34, 0), ("q4_0", 18, 0), ("q4_1", 20, 2), ("f16", 2, 0)]
)
def test_packed_rows_that_are_not_finite_are_refused(name: str, block: int, place: int) -> None:
    rows = PackedRows(data=np.zeros((3, block * 4), np.uint8), format=name)
    check_packed(rows, Path("m.gguf"), "blk.0.ffn_gate.weight")
    rows.data[1, place : place + 2] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(FormatError, match=r"blk.0.ffn_gate.weight"):
        check_packed(rows, Path("m.gguf"), "blk.0.ffn_gate.weight")
