"""The deviceless compile: reading of thunks, and the real thing where JAX's CUDA plugin is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compile_step

SEQUENCE = """001: kCustomKernel [source       | next=002 (1)] gemm_fusion_dot_1 grid: [256, 1, 1]
002: kAsyncStart   [prev=001 (1) | next=005 (3)] stream=computation_stream[1], async_id=13
    003: kCustomKernel [source | sink] gather_gate_up_relu grid: [256, 1, 1]
004: kCustomCall   [source       | next=005 (2)] kCustomCall
005: kAsyncDone    [source       | sink        ] async_id=13
"""


def test_thunks_are_read_in_order():
    thunks = compile_step.read_thunks(SEQUENCE)
    assert [thunk.split()[0] for thunk in thunks] == [
        "CustomKernel", "AsyncStart", "CustomKernel", "CustomCall", "AsyncDone"
    ]  # fmt: skip
    assert thunks[2].split()[1] == "gather_gate_up_relu"
    assert compile_step.overlaps(thunks)


def test_a_call_before_the_start_or_after_the_wait_does_not_overlap():
    kernel, start, inner, call, done = compile_step.read_thunks(SEQUENCE)
    assert not compile_step.overlaps([kernel, call, start, inner, done])
    assert not compile_step.overlaps([kernel, start, inner, done, call])
    assert not compile_step.overlaps([kernel, call])


@pytest.mark.skipif(compile_step.plugin_missing() is None, reason="JAX's CUDA plugin is installed")
def test_without_the_plugin_the_command_says_so(capsys: pytest.CaptureFixture[str]):
    assert compile_step.main([]) == 3
    assert "CUDA plugin is not installed" in capsys.readouterr().err


@pytest.mark.skipif(compile_step.plugin_missing() is not None, reason="JAX's CUDA plugin is not installed")
def test_programs_of_a_step_compile(tmp_path: Path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compile_step", "--json", "--implementation"]
    done = subprocess.run(
        [*command, "xla"], cwd=root, capture_output=True, text=True, env=dict(os.environ), timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    programs = {program["program"]: program for program in json.loads(done.stdout)}
    assert set(programs) == {"front", "residents", "layer with host callback"}
    assert programs["layer with host callback"]["overlaps"]
    assert programs["front"]["alias_bytes"] > 0, "the cache is donated"
