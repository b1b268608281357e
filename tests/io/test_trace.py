"""The trace format: round trip, and each way in which a file can be wrong."""

import json
from pathlib import Path

import numpy as np
import pytest

from kairox_jax.io.trace import TraceRecorder, read_trace, write_trace


def test_round_trip(tmp_path: Path, rng: np.random.Generator) -> None:
    active, ids = rng.random((5, 3, 13)) < 0.3, np.arange(5) * 7
    write_trace(tmp_path / "a.npz", active, ids, {"text": "x"})
    trace = read_trace(tmp_path / "a.npz")
    assert (trace.num_steps, trace.num_layers, trace.num_neurons, trace.name) == (5, 3, 13, "a")
    assert trace.meta == {"text": "x", "steps": 5}
    np.testing.assert_array_equal(np.stack([trace.active(step) for step in range(5)]), active)
    np.testing.assert_array_equal(trace.token_ids, ids)
    np.testing.assert_allclose(trace.frequencies(slice(1, 4)), active[1:4].mean(0), rtol=1e-6)
    part = trace.cut(slice(2, 4))
    assert part.num_steps == 2 and part.token_ids is not None and part.token_ids.tolist() == [14, 21]


def test_format_is_that_of_packbits(tmp_path: Path) -> None:
    active = np.zeros((1, 1, 10), bool)
    active[0, 0, [0, 9]] = True
    write_trace(tmp_path / "a.npz", active)
    stored = np.load(tmp_path / "a.npz")
    assert stored["active"].tolist() == [[[128, 64]]] and int(stored["num_neurons"]) == 10
    assert "token_ids" not in stored.files and json.loads(str(stored["meta"])) == {"steps": 1}


GOOD = {"active": np.zeros((2, 3, 2), np.uint8), "num_neurons": np.int64(13)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"active": None}, "'active' is missing"),
        ({"num_neurons": None}, "'num_neurons' is missing"),
        ({"active": np.zeros((2, 3), np.uint8)}, r"expected uint8 \[steps"),
        ({"active": np.zeros((2, 3, 2))}, "expected uint8"),
        ({"active": np.zeros((0, 3, 2), np.uint8)}, "expected uint8"),
        ({"num_neurons": np.int64(17)}, "does not fit"),
        ({"num_neurons": np.array([13])}, "does not fit"),
        ({"active": np.full((2, 3, 2), 255, np.uint8)}, "beyond num_neurons 13"),
        ({"token_ids": np.zeros(3, int)}, "token_ids"),
        ({"token_ids": np.zeros(2)}, "token_ids"),
        ({"meta": np.array("{")}, "no JSON"),
        ({"meta": np.array("[1]")}, "expected an object"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path: Path, change: dict, message: str) -> None:
    fields = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    np.savez(tmp_path / "bad.npz", **fields)
    with pytest.raises(ValueError, match=message) as caught:
        read_trace(tmp_path / "bad.npz")
    assert "\n" not in str(caught.value) and "bad.npz" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.npz"):
        read_trace(tmp_path / "bad.npz")
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.npz")


def test_recorder_refuses_what_does_not_fit(tmp_path: Path) -> None:
    recorder = TraceRecorder()
    with pytest.raises(ValueError, match="no step"):
        recorder.write(tmp_path / "a.npz")
    recorder.add_step(np.zeros((2, 9), bool), 5)
    with pytest.raises(ValueError, match="token id"):
        recorder.add_step(np.zeros((2, 9), bool))
    with pytest.raises(ValueError, match="expected bool"):
        recorder.add_step(np.zeros((2, 8), bool), 5)
    with pytest.raises(ValueError, match="expected bool"):
        recorder.add_step(np.zeros((2, 9)), 5)
