"""The grouping file: what is written is read, and nothing but permutations is taken."""

from pathlib import Path

import numpy as np
import pytest

from kairox_jax.io.grouping import Grouping, load_grouping, save_grouping


def test_reads_what_was_written(tmp_path: Path, rng: np.random.Generator) -> None:
    order = np.stack([rng.permutation(12) for _ in range(3)])
    path = tmp_path / "deep" / "grouping.npz"
    save_grouping(path, Grouping(permutation=order, group_size=4, meta={"model": "m"}))
    got = load_grouping(path)
    np.testing.assert_array_equal(got.permutation, order)
    assert (got.group_size, got.meta) == (4, {"model": "m"})


def test_wrong_groupings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layer 1 does not hold every neuron once"):
        Grouping(permutation=np.array([[0, 1], [0, 0]]), group_size=2)
    with pytest.raises(ValueError, match="--group-size 3 does not divide the 4 neurons"):
        Grouping(permutation=np.arange(4)[None], group_size=3)
    with pytest.raises(ValueError, match=r"shape \[4\]"):
        Grouping(permutation=np.arange(4), group_size=2)
    with pytest.raises(ValueError, match="cannot read .*none.npz"):
        load_grouping(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "other.npz", permutation=np.zeros((1, 2)))
    np.savez(tmp_path / "float.npz", permutation=np.zeros((1, 2)), group_size=2, meta="{}")
    for name in ("text", "other", "float"):
        with pytest.raises(ValueError, match=f"{name}.npz is no grouping: make it again with `kairox group`"):
            load_grouping(tmp_path / f"{name}.npz")
