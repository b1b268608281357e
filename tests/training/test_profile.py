"""The profile against plain loops over tokens, its text stream, its trace, and its mistakes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kairox_jax import cli
from kairox_jax.io.profile import load_profile
from kairox_jax.io.sparsity import Sparsity, fingerprint, save_sparsity
from kairox_jax.io.trace import read_trace
from training import profile
from training.text_stream import TextStream

LIMITS = np.array([0.05, 0.2, 0.4], np.float32)
WORDS = ["--window", "16", "--batch", "3", "--partners", "5"]


@pytest.fixture
def text(tmp_path: Path, rng: np.random.Generator) -> list[str]:
    """Two files: 7 whole windows of 16 bytes and a rest, and 4 windows."""
    letters = rng.integers(97, 123, 200).astype(np.uint8).tobytes().decode()
    (tmp_path / "a.txt").write_text(letters[:120])
    (tmp_path / "b.txt").write_text(letters[120:184])
    return [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]


@pytest.fixture
def opened(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tiny SiLU model with thresholds of its own in the folder s."""
    monkeypatch.setattr(profile, "open_checkpoint", lambda name: source)
    meta = {"fingerprint": fingerprint(source), "num_neurons": 40, "model": "tiny"}
    save_sparsity(tmp_path / "s", Sparsity(LIMITS, None, meta))
    return source


def measure(tmp_path: Path, text: list[str], *more: str) -> int:
    words = [
        "profile",
        "tiny",
        *text,
        "-o",
        str(tmp_path / "p.npz"),
        "--sparsity",
        str(tmp_path / "s"),
        *WORDS,
    ]
    return cli.main([*words, *more])


def reference(source: Any, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Active sets [W, T, L, F] and streams after attention [W, T, L, D], token by token in float64."""
    config = source.config
    active = np.zeros((*windows.shape, config.num_layers, config.num_neurons), bool)
    streams = np.zeros((*windows.shape, config.num_layers, config.d_model))

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * scale

    def rotate(x: np.ndarray) -> np.ndarray:  # [T, heads, H]
        half = x.shape[-1] // 2
        angle = np.arange(len(x))[:, None] * config.rope_theta ** (-np.arange(half) / half)[None]
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    for row, ids in enumerate(windows):
        x = source.tensor("embed").astype(np.float64)[ids]
        for layer in range(config.num_layers):
            w = {n: source.tensor(f"layers.{layer}.{n}").astype(np.float64) for n in NAMES}
            h = norm(x, w["attn_norm"])
            q, k, v = ((h @ w[n].T).reshape(len(ids), -1, config.head_dim) for n in ("wq", "wk", "wv"))
            k, v = (np.repeat(a, config.num_heads // config.num_kv_heads, axis=1) for a in (k, v))
            scores = np.einsum("tnh,snh->nts", rotate(q), rotate(k)) / np.sqrt(config.head_dim)
            scores = np.where(np.tri(len(ids), dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            x = x + np.einsum("nts,snh->tnh", weights, v).reshape(len(ids), -1) @ w["wo"].T
            streams[row, :, layer] = x
            h = norm(x, w["ffn_norm"])
            gate, up = h @ w["w_gate"].T, h @ w["w_up"].T
            z = gate / (1 + np.exp(-gate)) * up
            active[row, :, layer] = np.abs(z) > LIMITS[layer]
            size = np.abs(z)  # just over the threshold a value counts in part
            x = x + (np.sign(z) * np.clip(3 * (size - LIMITS[layer]), 0, size)) @ w["w_down"]
    return active, streams


NAMES = ("attn_norm", "wq", "wk", "wv", "wo", "ffn_norm", "w_gate", "w_up", "w_down")


def test_profile_is_that_of_plain_loops(
    opened: Any, text: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(tmp_path, text, "--trace", str(tmp_path / "t.npz")) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    raw = [Path(name).read_bytes() for name in text]
    rows = [list(data[s : s + 16]) for data in raw for s in range(0, len(data) - 15, 16)]
    windows = np.array(rows, np.int32)
    active, streams = reference(opened, windows)
    tokens = active.reshape(-1, 3, 40)
    got = load_profile(tmp_path / "p.npz")

    np.testing.assert_allclose(got.frequency, tokens.mean(0), atol=0.006)  # one tie, and float16
    share = tokens.mean(-1)
    assert got.active_frac is not None
    np.testing.assert_allclose(got.active_frac, np.stack([share.mean(0), share.std(0)], 1), atol=1e-3)
    assert got.cosine is not None
    unit = streams / np.linalg.norm(streams, axis=-1, keepdims=True)
    for distance in (1, 2):
        want = (unit[..., :-distance, :] * unit[..., distance:, :]).sum(-1).mean((0, 1))
        np.testing.assert_allclose(got.cosine[: 3 - distance, distance - 1], want, atol=1e-4)
    assert np.isnan(got.cosine[2]).all() and np.isnan(got.cosine[1, 1])
    assert got.reactivation is not None and np.isnan(got.reactivation[:, 15:]).all()
    for d in (1, 7, 15):
        again = (active[:, d:] & active[:, :-d]).sum((0, 1, 3)) / active[:, :-d].sum((0, 1, 3))
        np.testing.assert_allclose(got.reactivation[:, d - 1], again, atol=2e-3)
    assert got.partners is not None and got.together is not None and got.sample is not None
    values = tokens[:, 1].astype(float)
    matrix = values.T @ values / len(values)
    np.fill_diagonal(matrix, -1)
    np.testing.assert_allclose(got.together[1], -np.sort(-matrix, axis=1)[:, :5], atol=0.006)

    trace = read_trace(tmp_path / "t.npz")
    np.testing.assert_array_equal(trace.token_ids, windows.ravel())
    unpacked = np.stack([trace.active(step) for step in range(trace.num_steps)])
    assert (unpacked != tokens).mean() < 1e-3
    assert trace.meta["fingerprint"] == got.meta["fingerprint"] == fingerprint(opened)
    assert not (tmp_path / "t.npz.part").exists()

    assert got.meta["tokens"] == windows.size
    assert [file["windows"] for file in got.meta["files"]] == [7, 4]
    np.testing.assert_allclose(got.meta["thresholds"], LIMITS)
    assert cli.main(["profile", str(tmp_path / "p.npz"), "--show"]) == 0
    again = capsys.readouterr().out
    assert again.splitlines()[:2] == shown.splitlines()[:2] and "176 tokens of a.txt, b.txt" in again


def test_a_stream_holds_no_more_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.text_stream.PIECE_CHARS", 64)
    lengths: list[int] = []

    def encode(piece: str) -> list[int]:
        lengths.append(len(piece))
        return list(piece.encode())

    (tmp_path / "long.txt").write_text("word and line\n" * 500 + "x" * 300)
    stream = TextStream([tmp_path / "long.txt"], encode, 10, bos_id=7)
    rows = np.concatenate(list(stream.batches(4)))
    assert max(lengths) < 2 * 64
    assert (rows[:, 0] == 7).all()
    want = ("word and line\n" * 500 + "x" * 300).encode()
    np.testing.assert_array_equal(rows[:, 1:].ravel(), np.frombuffer(want[: rows[:, 1:].size], np.uint8))
    assert stream.read_bytes == len(want) == stream.files[0]["bytes"] == stream.total_bytes()


def test_mistakes_take_one_line(
    opened: Any,
    text: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(message: str, files: list[str], *more: str) -> None:
        assert measure(tmp_path, files, *more) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert lines[-1].startswith("kairox: error: ") and message in lines[-1], lines
        assert not (tmp_path / "p.npz").exists() and not list(tmp_path.glob("t.npz*"))

    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9" * 20)
    trace = ["--trace", str(tmp_path / "t.npz")]
    fails("empty.txt is empty: give a file with text", [str(tmp_path / "empty.txt")], *trace)
    fails("no text is as long as a window of 16 tokens", [str(tmp_path / "short.txt")], *trace)
    fails("latin.txt is not UTF-8", [str(tmp_path / "latin.txt")])
    fails("cannot read text", [str(tmp_path / "none.txt")])
    fails("give text files, or --powerinfer FOLDER", [])
    fails("--window 100: this model takes windows of 8 to 64", text, "--window", "100")
    fails("--partners 40 must be 1 to 39", text, "--partners", "40")
    monkeypatch.setattr(opened, "broken", True)
    fails("layer 1 is NaN or infinite", text, *trace)
    assert cli.main(["profile", "tiny", *text]) == 2
    assert "needs --out FILE" in capsys.readouterr().err
    assert cli.main(["profile", "p.npz", "t.txt", "--show", "--window", "9"]) == 2
    assert "leave out t.txt --window" in capsys.readouterr().err


def test_powerinfers_counts_become_a_profile(
    source: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = type(source)(activation="relu")
    monkeypatch.setattr(profile, "open_checkpoint", lambda name: source)
    counts = np.arange(120.0).reshape(3, 40)
    monkeypatch.setattr(profile, "read_activations", lambda folder: (counts / 119, True))
    words = ["profile", "tiny", "--powerinfer", "folder", "-o", str(tmp_path / "p.npz")]
    assert cli.main(words) == 0, capsys.readouterr().err
    assert "only relative" in capsys.readouterr().out
    got = load_profile(tmp_path / "p.npz")
    np.testing.assert_allclose(got.frequency, counts / 119, atol=1e-3)
    assert json.dumps(got.meta) and got.meta["fingerprint"] == fingerprint(source)
    monkeypatch.setattr(profile, "read_activations", lambda folder: (counts[:2] / 119, True))
    assert cli.main(words) == 2
    assert "folder has 2 layers of 40 neurons, tiny 3 of 40" in capsys.readouterr().err
