"""Replay with a grouping is a replay of the reordered trace."""

import json
from pathlib import Path

import numpy as np
import pytest

from kairox_jax import cli
from kairox_jax.io.grouping import Grouping, save_grouping
from kairox_jax.sim import read_trace, write_trace
from kairox_jax.sim.groups import reorder, reorder_prior


@pytest.fixture
def active(rng: np.random.Generator) -> np.ndarray:
    """Neurons 0, 3, 6, ... fire together, as do 1, 4, ... and 2, 5, ..."""
    on = rng.random((60, 2, 3)) < 0.4
    return np.tile(on, (1, 1, 8))


def write(folder: Path, active: np.ndarray, order: np.ndarray, **meta: str) -> tuple[str, str]:
    write_trace(folder / "t.npz", active, meta={"fingerprint": "a", "model": "trace's"})
    save_grouping(folder / "g.npz", Grouping(permutation=order, group_size=8, meta=meta))
    return str(folder / "t.npz"), str(folder / "g.npz")


def replayed(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    assert cli.main(["replay", *words, "--policy", "paper", "--capacity", "9", "--json"]) == 0, (
        capsys.readouterr().err
    )
    return json.loads(capsys.readouterr().out)


def test_the_files_groups_move(
    tmp_path: Path, active: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    order = np.tile(np.argsort(np.arange(24) % 3, kind="stable"), (2, 1))
    trace, grouping = write(tmp_path, active, order, fingerprint="a")
    with_groups = replayed([trace, "--grouping", grouping], capsys)
    write_trace(tmp_path / "sorted.npz", active[:, :, order[0]])
    by_hand = replayed([str(tmp_path / "sorted.npz"), "--group-size", "8"], capsys)
    assert with_groups["totals"] == by_hand["totals"]
    neighbours = replayed([trace, "--group-size", "8"], capsys)
    assert with_groups["totals"] != neighbours["totals"]


def test_each_layer_has_its_own_order(tmp_path: Path, active: np.ndarray, rng: np.random.Generator) -> None:
    order = np.stack([rng.permutation(24) for _ in range(2)])
    write_trace(tmp_path / "t.npz", active)
    grouping = Grouping(permutation=order, group_size=8)
    got = reorder(read_trace(tmp_path / "t.npz"), grouping)
    prior = active.mean(axis=0)
    moved = reorder_prior(prior, grouping)
    assert moved is not None and reorder_prior(None, grouping) is None
    for step, layer, place in ((0, 0, 5), (7, 1, 23), (59, 1, 0)):
        assert got.active(step)[layer, place] == active[step, layer, order[layer, place]]
        assert moved[layer, place] == prior[layer, order[layer, place]]


def test_groupings_of_other_models_are_refused(
    tmp_path: Path, active: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, grouping = write(tmp_path, active, np.tile(np.arange(24), (2, 1)), fingerprint="b", model="other")
    other = str(tmp_path / "h.npz")
    save_grouping(other, Grouping(permutation=np.arange(24)[None], group_size=8))
    for words, message in (
        (["--grouping", grouping], "the grouping was made for other, trace t is of trace's"),
        (["--grouping", other], "1 layers of 24 neurons, trace t 2 of 24"),
        (["--grouping", grouping, "--group-size", "4"], "--group-size 4 is not that of"),
        (["--grouping", str(tmp_path / "none.npz")], "cannot read"),
    ):
        assert cli.main(["replay", trace, *words]) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1 and message in lines[0], lines
