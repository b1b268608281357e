"""The profile file: round trip, the first form, what is refused, and its use as a prior."""

from pathlib import Path

import numpy as np
import pytest

from kairox_jax.io.profile import Profile, check_fingerprint, load_profile, save_profile
from kairox_jax.io.sparsity import SHIPPED, load_sparsity


def some(rng: np.random.Generator) -> Profile:
    together = np.sort(rng.random((2, 10, 3)).astype(np.float32))[..., ::-1]
    return Profile(
        frequency=rng.random((2, 10)).astype(np.float32),
        active_frac=rng.random((2, 2)).astype(np.float32),
        cosine=np.array([[0.9, np.nan], [np.nan, np.nan]], np.float32),
        reactivation=rng.random((2, 64)).astype(np.float32),
        partners=rng.integers(0, 10, (2, 10, 3)).astype(np.int32),
        together=together,
        sample=rng.integers(0, 255, (7, 2, 2)).astype(np.uint8),
        meta={"fingerprint": "f", "model": "m", "num_neurons": 10, "thresholds": [0.1, 0.2]},
    )


def test_reads_what_was_written(tmp_path: Path, rng: np.random.Generator) -> None:
    want = some(rng)
    save_profile(tmp_path / "deep" / "p.npz", want)
    got = load_profile(tmp_path / "deep" / "p.npz")
    for name in ("frequency", "active_frac", "cosine", "reactivation", "together"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=1e-3)
        assert getattr(got, name).dtype == np.float32
    np.testing.assert_array_equal(got.partners, want.partners)
    np.testing.assert_array_equal(got.sample, want.sample)
    assert got.meta == want.meta


def test_the_first_form_stays_readable(tmp_path: Path) -> None:
    for folder in sorted(SHIPPED.glob("*/profile.npz")):
        old = load_profile(folder)
        assert old.frequency.shape == (30, 1536) and old.sample is None and old.meta == {}
        sparsity = load_sparsity(folder.parent)
        np.testing.assert_array_equal(sparsity.frequency, old.frequency)


def test_a_profile_alone_is_thresholds_and_prior(tmp_path: Path, rng: np.random.Generator) -> None:
    want = some(rng)
    save_profile(tmp_path / "profile.npz", want)
    for where in (tmp_path, tmp_path / "profile.npz"):
        got = load_sparsity(where)
        np.testing.assert_allclose(got.thresholds, [0.1, 0.2])
        np.testing.assert_allclose(got.frequency, want.frequency, atol=1e-3)
        assert got.meta["fingerprint"] == "f" and got.meta["num_layers"] == 2
    (tmp_path / "old").mkdir()
    np.savez(tmp_path / "old" / "profile.npz", frequency=want.frequency)
    with pytest.raises(ValueError, match="alone does not say fingerprint, thresholds: put thresholds.json"):
        load_sparsity(tmp_path / "old")


def test_a_profile_of_another_model_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    save_profile(tmp_path / "profile.npz", some(rng))
    text = '{"format": 1, "fingerprint": "g", "model": "n", "num_layers": 2, "num_neurons": 10, "thresholds": [1, 2]}'
    (tmp_path / "thresholds.json").write_text(text)
    with pytest.raises(ValueError, match="profile.npz was made for m, thresholds.json beside it for n"):
        load_sparsity(tmp_path)
    with pytest.raises(ValueError, match="the file was made for m, not for this model"):
        check_fingerprint({"fingerprint": "f", "model": "m"}, "g", "the file")
    check_fingerprint({"fingerprint": "f"}, "f", "the file")


def test_wrong_profiles_are_refused(tmp_path: Path) -> None:
    share = np.full((2, 10), 0.5, np.float32)
    with pytest.raises(ValueError, match="shares outside 0 to 1, or NaN"):
        Profile(frequency=share * np.nan)
    with pytest.raises(ValueError, match=r"cosine has shape \[2, 3\], expected \[2, 2\]"):
        Profile(frequency=share, cosine=np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="only one of partners and together"):
        Profile(frequency=share, partners=np.zeros((2, 10, 3), np.int32))
    with pytest.raises(ValueError, match=r"partners outside 0..9"):
        Profile(
            frequency=share,
            partners=np.full((2, 10, 3), 10, np.int32),
            together=np.zeros((2, 10, 3), np.float32),
        )
    with pytest.raises(ValueError, match="lacks 'fingerprint'"):
        save_profile(tmp_path / "p.npz", Profile(frequency=share))
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "other.npz", active=share)
    for name in ("text", "other"):
        with pytest.raises(ValueError, match=f"{name}.npz is no activation profile: make it again"):
            load_profile(tmp_path / f"{name}.npz")
    with pytest.raises(ValueError, match="cannot read .*none.npz"):
        load_profile(tmp_path / "none.npz")
