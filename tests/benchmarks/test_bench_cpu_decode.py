"""The benchmark's arithmetic and its processes, with a rival that measures nothing."""

import io
import json
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks import cpu_worker
from benchmarks.bench_cpu_decode import Settings, add_ratios, main, peer_missing
from benchmarks.machine import CpuUse, cpu_model, cpu_use, facts, others_frac
from benchmarks.rival_process import RivalProcess
from benchmarks.spread import mean_parts, paired_ratios, spread


def test_spread_of_known_samples():
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == {
        "median": 3, "q1": 2, "q3": 4, "min": 1, "max": 5, "samples": [4, 1, 3, 2, 5],
    }  # fmt: skip


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")]])
def test_spread_refuses_what_is_no_sample(samples):
    with pytest.raises(ValueError, match="finite"):
        spread(samples)


def test_ratios_are_taken_round_by_round():
    # The machine slows down tenfold in the last round; the ratio of each round is still 2.
    assert paired_ratios([20, 22, 2], [10, 11, 1])["samples"] == [2, 2, 2]
    with pytest.raises(ValueError, match="same rounds"):
        paired_ratios([1, 2], [1])


def test_means_of_parts_add_up_where_medians_would_not():
    rounds = [{"a": 1.0, "b": 5.0}, {"a": 2.0, "b": 0.0}, {"a": 6.0, "b": 1.0}]
    assert sum(mean_parts(rounds).values()) == pytest.approx(sum(sum(r.values()) for r in rounds) / 3)


def test_ratios_need_the_peer():
    def record(name, speed):
        return {"name": name, "decode_tokens_per_s": spread([speed]), "prefill_tokens_per_s": spread([speed])}

    alone, beside, peer = record("dense", 5.0), record("dense", 5.0), record("llama.cpp", 10.0)
    add_ratios([alone])
    add_ratios([beside, peer])
    assert "decode_over_peer" not in alone and "decode_over_peer" not in peer
    assert beside["decode_over_peer"]["median"] == 0.5


def test_worker_answers_and_reports_errors(monkeypatch):
    class Rival:
        def facts(self):
            return {"load_s": 0.5}

        def decode(self, ids, tokens):
            if not ids:
                raise ValueError("no prompt")
            return {"tokens_per_s": tokens * len(ids)}

    monkeypatch.setitem(cpu_worker.RIVALS, "fake", (__name__, "FakeRival"))
    monkeypatch.setattr(sys.modules[__name__], "FakeRival", Rival, raising=False)
    requests = [{"kind": "fake"}, {"do": "decode", "ids": [1, 2], "tokens": 3}]
    requests += [{"do": "decode", "ids": [], "tokens": 3}, {"do": "memory"}]
    answers = io.StringIO()
    cpu_worker.serve(io.StringIO("\n".join(map(json.dumps, requests))), answers)
    got = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert got[:3] == [{"load_s": 0.5}, {"tokens_per_s": 6}, {"error": "no prompt"}]
    assert got[3]["peak_bytes"] > 10e6


def test_a_process_tells_its_own_error_and_its_end(default_model):
    with pytest.raises(ValueError, match="mode 'none' is unknown"):
        RivalProcess("kairox", model=str(default_model), mode="none", slots=None, context=512)
    with pytest.raises(ValueError, match="ended with status 1"):
        RivalProcess("no such kind")


def test_settings_and_command_line_errors(capsys):
    with pytest.raises(ValueError, match="--tokens 0"):
        Settings(model="m", repeats=1, tokens=0, context=512, rivals=("dense",))
    assert main(["--context", "300"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--context 300" in error
    assert main(["--rivals", "dense,fast"]) == 2
    assert "--rivals dense,fast: name one or more of dense, exact 0" in capsys.readouterr().err


def test_help_says_how_to_build_the_peer(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "-DGGML_NATIVE=OFF" in shown and "llama-cpp-python" in shown
    assert "GGUF" in (peer_missing("folder") or "")


def test_the_share_of_others():
    before = CpuUse(wall_s=100, busy_s=50, own_s=20)
    # In 10 s of 2 CPUs, 17 of 20 s were busy, 12 of them ours.
    assert others_frac(before, CpuUse(wall_s=110, busy_s=67, own_s=32), 2) == 0.25
    assert others_frac(before, None, 2) is None


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux's /proc/stat")
def test_cpu_use_counts_this_process():
    before, spent = cpu_use([os.getpid()]), time.process_time()
    while time.process_time() < spent + 0.1:
        pass
    after = cpu_use([os.getpid()])
    assert before is not None and after is not None
    assert 0.05 <= after.own_s - before.own_s <= 5 and after.busy_s - before.busy_s >= 0.05


def test_facts_name_the_machine():
    found = facts()
    assert cpu_model() and found["logical_cpus"] >= 1 and len(found["git"]["commit"] or "x" * 40) == 40
