"""Sparsity files: what is written comes back, and nothing wrong is accepted."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from kairox_jax.config import ModelConfig
from kairox_jax.io import open_checkpoint
from kairox_jax.io.sparsity import (
    SHIPPED,
    Sparsity,
    check_model,
    fingerprint,
    load_sparsity,
    save_sparsity,
    shipped_sparsity,
)

L, F = 3, 5


class Source:
    """Norms of a model of 3 layers; every other weight is irrelevant here."""

    def __init__(self, seed: int = 0, neurons: int = F, weight_noise: float = 0.0) -> None:
        self.config = ModelConfig(
            family="llama",
            num_layers=L,
            d_model=4,
            num_neurons=neurons,
            num_heads=2,
            num_kv_heads=1,
            head_dim=2,
            vocab_size=7,
            context_length=16,
            activation="silu",
        )
        self.seed, self.weight_noise = seed, weight_noise

    def tensor(self, name: str) -> np.ndarray:
        values = np.random.default_rng([self.seed, *name.encode()]).normal(size=4).astype(np.float32)
        return values if name.endswith("norm") else values + np.float32(self.weight_noise)


def make(source: Source, *, frequency: bool = True) -> Sparsity:
    rng = np.random.default_rng(3)
    meta = {"model": "tiny", "fingerprint": fingerprint(source), "num_neurons": source.config.num_neurons}
    thresholds = rng.uniform(0, 0.1, L).astype(np.float32)
    return Sparsity(thresholds, rng.uniform(size=(L, F)).astype(np.float32) if frequency else None, meta)


@pytest.mark.parametrize("frequency", [True, False])
def test_comes_back(tmp_path: Path, frequency: bool) -> None:
    want = make(Source(), frequency=frequency)
    save_sparsity(tmp_path / "new" / "folder", want)
    got = load_sparsity(tmp_path / "new" / "folder")
    np.testing.assert_array_equal(got.thresholds, want.thresholds)
    assert got.thresholds.dtype == np.float32
    assert {**want.meta, "num_layers": L} == got.meta
    if want.frequency is None:
        assert got.frequency is None
    else:
        assert got.frequency is not None and got.frequency.dtype == np.float32
        np.testing.assert_allclose(got.frequency, want.frequency, rtol=2**-10)


def test_saving_without_a_profile_leaves_none_behind(tmp_path: Path) -> None:
    save_sparsity(tmp_path, make(Source()))
    save_sparsity(tmp_path, make(Source(), frequency=False))
    assert load_sparsity(tmp_path).frequency is None


def test_fingerprint_tells_models_apart_but_not_quantisations() -> None:
    assert fingerprint(Source()) == fingerprint(Source(weight_noise=0.1))
    assert fingerprint(Source()) != fingerprint(Source(seed=1))
    assert fingerprint(Source()) != fingerprint(Source(neurons=F + 1))


def test_fingerprint_of_a_quantised_file(write_llama) -> None:
    types = {"blk.0.ffn_up.weight": gguf.GGMLQuantizationType.Q8_0}
    plain = fingerprint(open_checkpoint(write_llama()))
    assert fingerprint(open_checkpoint(write_llama(types=types))) == plain


def test_shipped_is_found_by_fingerprint(tmp_path: Path) -> None:
    assert shipped_sparsity(Source(), tmp_path) is None
    for seed in range(3):
        save_sparsity(tmp_path / f"model{seed}", make(Source(seed)))
    found = shipped_sparsity(Source(1), tmp_path)
    assert found is not None
    assert found.meta["fingerprint"] == fingerprint(Source(1))
    assert shipped_sparsity(Source(9), tmp_path) is None


@pytest.mark.parametrize("thresholds", [[0.1, np.nan, 0.2], [0.1, -0.5, 0.2], [0.1, np.inf, 0.2]])
def test_refuses_thresholds_that_are_no_numbers(thresholds: list[float]) -> None:
    with pytest.raises(ValueError, match=r"threshold \S+ of layer 1 must be finite and not negative"):
        Sparsity(np.array(thresholds, np.float32), None)


def test_refuses_wrong_shapes_and_shares() -> None:
    thresholds = np.zeros(L, np.float32)
    with pytest.raises(ValueError, match=r"shape \(2, 5\), not 3 layers"):
        Sparsity(thresholds, np.zeros((2, F), np.float32))
    with pytest.raises(ValueError, match=r"shape \(\)"):
        Sparsity(np.float32(0.1), None)  # type: ignore[arg-type]
    for wrong in (np.nan, 1.5, -0.1):
        with pytest.raises(ValueError, match="outside 0 to 1, or NaN"):
            Sparsity(thresholds, np.full((L, F), wrong, np.float32))


def test_refuses_another_model() -> None:
    check_model(make(Source()), Source())
    with pytest.raises(ValueError, match="made for tiny, not for this model"):
        check_model(make(Source()), Source(seed=1))
    with pytest.raises(ValueError, match="tiny has 3 layers of 5 neurons, this model 3 of 6"):
        check_model(make(Source()), Source(neurons=6))


def test_saving_needs_the_model() -> None:
    with pytest.raises(ValueError, match="lacks 'fingerprint'"):
        save_sparsity("nowhere", Sparsity(np.zeros(L, np.float32), None, {"num_neurons": F}))


def test_refuses_damaged_files(tmp_path: Path) -> None:
    file = tmp_path / "thresholds.json"
    with pytest.raises(ValueError, match="cannot read .*No such file.*make it again"):
        load_sparsity(tmp_path)
    save_sparsity(tmp_path, make(Source()))
    good = json.loads(file.read_text())

    def write(**changes: object) -> None:
        content = {**good, **changes}
        file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    for changes, message in (
        ({"thresholds": None}, "lacks thresholds"),
        ({"format": 99}, "not of format 1"),
        ({"thresholds": [0.1, 0.2]}, r"profile has shape \(3, 5\), not 2 layers"),
        ({"thresholds": ["a", "b", "c"]}, "no list of numbers"),
        ({"num_neurons": F + 1}, r"profile of shape \(3, 5\), not \(3, 6\)"),
        ({"num_layers": L + 1}, "3 thresholds for 4 layers"),
    ):
        write(**changes)
        with pytest.raises(ValueError, match=message):
            load_sparsity(tmp_path)
    for text, message in (("[]", "no JSON object"), ("{", "is no JSON")):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_sparsity(tmp_path)
    write()
    (tmp_path / "profile.npz").write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(ValueError, match="is no activation profile"):
        load_sparsity(tmp_path)


def test_every_shipped_folder_is_whole() -> None:
    folders = sorted(path.parent for path in SHIPPED.glob("*/thresholds.json"))
    assert [folder.name for folder in folders if folder.name == "smollm2-135m"]
    for folder in folders:
        sparsity = load_sparsity(folder)
        assert sparsity.frequency is not None
        limit = sparsity.meta["max_loss"]
        for kind, row in sparsity.meta["losses"].items():
            assert limit is None or row["rise"] <= limit, f"{folder.name} {kind}"


@pytest.mark.model
def test_default_model_has_one(default_model: Path) -> None:
    source = open_checkpoint(default_model)
    sparsity = shipped_sparsity(source)
    assert sparsity is not None
    assert sparsity.thresholds.shape == (30,) and (sparsity.thresholds > 0).all()
    assert sparsity.frequency is not None and sparsity.frequency.shape == (30, 1536)
    assert 0.3 < sparsity.frequency.mean() < 0.6
