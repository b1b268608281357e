"""The parts that measure host and device together, on the CPU at tiny sizes; their tables; the callback bench."""

import json

import numpy as np
import pytest

from benchmarks import bench_callback
from benchmarks.gpu import callbacks, commits
from benchmarks.gpu.report import table_of
from benchmarks.gpu.settings import SIZES, TimeBox
from kairox_jax.config import HOST_CALLBACKS

TINY = SIZES["tiny"]


@pytest.mark.slow
def test_callbacks_measures_each_backend():
    result = callbacks.run(TINY, TimeBox(120))
    rows = result["rows"]
    assert [row["backend"] for row in rows] == [name for name in HOST_CALLBACKS for _ in TINY.work_us]
    for row in rows:
        saved = row["callback_us"] + row["device_us"] - row["both_us"]
        assert np.isclose(row["overlap_frac"], saved / min(row["callback_us"], row["device_us"]))
    assert rows[0]["neurons"] == 0 and rows[1]["neurons"] > 0
    assert table_of("callbacks", result).count("\n") == len(rows) + 1


def test_all_forms_of_a_step_compute_the_same():
    neurons = callbacks.random_neurons(*TINY.callback_shape)
    answers = []
    for backend in HOST_CALLBACKS:
        call = callbacks.host_ffn(neurons, backend)
        run = callbacks._split_step if backend == "split" else callbacks._jitted_step
        answers.append(np.asarray(run(call, neurons, 64, "cpu")[2]()))
    for answer in answers[1:]:
        np.testing.assert_allclose(answer, answers[0], rtol=1e-5, atol=1e-6)
    assert np.abs(answers[0]).max() > 0.1


def test_commits_measures_each_size():
    result = commits.run(TINY, TimeBox(120))
    assert [row["records"] for row in result["rows"]] == list(TINY.commit_records)
    assert all(row["with_commit_us"] > 0 and row["layer_us"] > 0 for row in result["rows"])
    assert "| 4 " in table_of("commits", result)


def test_bench_callback_writes_what_it_prints(tmp_path, capsys):
    out = tmp_path / "folder/callback.json"
    assert bench_callback.main(["--out", str(out), "--repeats", "2", "--size", "tiny"]) == 0
    record = json.loads(out.read_text())
    assert record["versions"]["numpy"] == np.__version__
    printed = capsys.readouterr().out
    assert all(
        f"{row['backend']}, {row['work_us']} us" in printed for row in record["parts"]["callbacks"]["rows"]
    )
