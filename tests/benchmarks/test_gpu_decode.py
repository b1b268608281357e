"""The synthetic model, decoding it under a budget, and the command itself; only the device check is stood in for."""

import json

import numpy as np
import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import decode
from benchmarks.gpu.report import table_of
from benchmarks.gpu.settings import SIZES, TimeBox
from benchmarks.gpu.synthetic import ACTIVE_FRAC, SyntheticModel

TINY = SIZES["tiny"]


def test_neurons_are_active_as_often_as_their_bias_says():
    model = SyntheticModel(2, 256, 512, 4, 300)
    assert abs(model.frequencies.mean() - ACTIVE_FRAC) < 0.03
    assert (model.frequencies > 0.5).mean() > 0.03, "some neurons are hot"
    x = model.tensor("embed").astype(np.float64)
    h = x / np.sqrt((x**2).mean(axis=1, keepdims=True))
    gate = model.packed("layers.1.w_gate")
    assert gate is not None
    active = h @ gate.dequantize().astype(np.float64).T > 0
    assert abs(active.mean() - ACTIVE_FRAC) < 0.03
    assert np.corrcoef(active.mean(axis=0), model.frequencies[1])[0, 1] > 0.97


def test_no_layer_changes_the_constant_part():
    model = SyntheticModel(2, 64, 96, 2, 128)
    down = model.packed("layers.0.w_down")
    assert down is not None and not down.dequantize()[:, :4].any() and down.dequantize()[:, 4:].any()
    assert not model.tensor("layers.0.wo")[:4].any()
    with pytest.raises(KeyError, match="no tensor 'layers.0.bq'"):
        model.tensor("layers.0.bq")


def test_decode_under_a_budget_with_each_policy():
    rows = decode.decode(TINY, 2, TINY.budgets[0], TimeBox(120))
    assert [row["policy"] for row in rows] == list(TINY.policies)
    for row in rows:
        assert "failed" not in row, row
        assert row["tokens"] == TINY.tokens and row["tokens_per_s"] > 0
        assert 0.05 < row["active_frac"] < 0.3 and 0 < row["hit_frac"] <= 1
        assert 0 < row["slots_per_layer"] <= 96
    assert "guide" in table_of("decode", {"rows": rows})


def test_a_budget_that_is_too_small_is_a_row_that_says_so():
    rows = decode._in_a_process("tiny", 2, 1000, 60.0)
    assert len(rows) == 1 and "too small for the dense part" in rows[0]["failed"]
    assert "too small" in table_of("decode", {"rows": rows})


def test_without_a_gpu_the_command_says_so_and_exits_3(capsys: pytest.CaptureFixture[str], tmp_path):
    out = tmp_path / "x.json"
    assert command.main(["--out", str(out)]) == 3
    printed = capsys.readouterr()
    assert printed.err.startswith("no GPU: JAX's first device is cpu") and printed.err.count("\n") == 1
    assert not out.exists()


def test_the_command_runs_parts_writes_json_and_prints_tables(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "find_device", lambda: {"platform": "gpu", "name": "Test GPU"})
    out = tmp_path / "gpu/test.json"
    assert command.main(["--parts", "link", "--size", "tiny", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["device"]["name"] == "Test GPU" and record["parts"]["link"]["rows"]
    printed = capsys.readouterr()
    assert "pinned_host, GB/s" in printed.out and "link: 6 rows" in printed.err


def test_a_part_that_hangs_or_dies_is_recorded(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "find_device", lambda: {"platform": "gpu", "name": "Test GPU"})
    monkeypatch.setattr(command, "GRACE_S", -59.9)
    monkeypatch.setitem(command.PARTS, "link", 60)
    out = tmp_path / "test.json"
    assert command.main(["--parts", "link", "--size", "tiny", "--out", str(out)]) == 1
    assert "no answer" in json.loads(out.read_text())["parts"]["link"]["failed"]
    assert "link failed: no answer" in capsys.readouterr().out


def test_unknown_parts_are_named(capsys: pytest.CaptureFixture[str]):
    assert command.main(["--parts", "link,speed"]) == 2
    assert "'speed' is unknown: choose of numerics, link" in capsys.readouterr().err
