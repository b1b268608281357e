"""The synthetic checkpoint is a real one, and the worker counts what it keeps."""

from pathlib import Path

import numpy as np

from benchmarks.bench_import_memory import CONFIG, files_of, work, write_model
from kairox_jax.io import open_checkpoint

SMALL = CONFIG | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 128,
}


def test_a_small_one(tmp_path: Path) -> None:
    num_bytes = write_model(tmp_path / "model", SMALL)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert len(files_of(tmp_path / "model")) == 3
    assert (
        checkpoint.num_bytes
        == num_bytes
        == sum(2 * int(np.prod(checkpoint.shape(name))) for name in checkpoint.names())
    )
    up = checkpoint.tensor("layers.2.w_up")
    assert (np.abs(up) >= 2**-6).all() and (np.abs(up) < 2**-5).all() and len(np.unique(up)) > 500
    facts = work("import", tmp_path / "model")
    vectors = sum(2 * checkpoint.shape(n)[0] for n in checkpoint.names() if len(checkpoint.shape(n)) == 1)
    assert facts["kept_bytes"] == num_bytes + vectors  # float32 in memory
    work("convert", tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
