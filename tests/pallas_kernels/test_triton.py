"""The Triton twins: numerics in Triton's interpreter, machine code without spills, clear errors without packages."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import kernel_oracle as oracle
import numpy as np
import pytest

from pallas_kernels import gather_down, implementations
from pallas_kernels.gather_down.cases import CASES as DOWN_CASES
from pallas_kernels.gather_gate_up.cases import CASES as GATE_UP_CASES

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the triton package is not installed"
)


def run(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=timeout
    )


@needs_triton
def test_every_case_equals_float64_in_the_interpreter():
    done = run(str(Path(__file__).with_name("triton_interpreter.py")))
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    wanted = {("gather_gate_up", case.name) for case in GATE_UP_CASES}
    wanted |= {("gather_down", case.name) for case in DOWN_CASES}
    assert {(line["op"], line["case"]) for line in lines} == wanted
    bad = [
        line
        for line in lines
        if not line["error"] <= oracle.TOLERANCES[line["dtype"]] or not line["same_active"]
    ]
    assert not bad


@needs_triton
def test_twins_compile_to_machine_code():
    script = (
        "import json; from dataclasses import asdict; from benchmarks.compile_kernels import compile_all;"
        "ops = ('twin_gather_gate_up_relu', 'twin_gather_down');"
        "rows = compile_all(archs=(89,), dtypes=('bfloat16', 'q4_0'), batches=(1,), ops=ops);"
        "print(json.dumps([asdict(row) for row in rows]))"
    )
    done = run("-W", "ignore", "-c", script)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout)
    assert len(rows) == 4
    assert all(20 < row["registers"] <= 255 and row["spill_bytes"] == 0 for row in rows)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    arguments = np.zeros((1, 2), np.float32), np.zeros((4, 8), np.float32), np.zeros(2, np.int32), np.int32(1)
    with pytest.raises(ValueError, match="needs jax-triton .*pip install 'kairox-jax\\[cuda\\]'") as error:
        gather_down(*arguments, deterministic=True, implementation="triton", platform="cuda")
    assert "\n" not in str(error.value)


def test_auto_takes_the_twin_where_pallas_has_no_triton_any_more():
    script = (
        "import sys; sys.modules['jax.experimental.pallas.triton'] = None\n"
        "from pallas_kernels import resolve_implementation, slot_scatter, gather_down\n"
        "import numpy as np, jax.numpy as jnp\n"
        "print(resolve_implementation('auto', 'cuda'), resolve_implementation('auto', 'cpu'))\n"
        "rows = (jnp.zeros((4, 8)),)\n"
        "out = slot_scatter(rows, jnp.ones((1, 1, 8)), jnp.array([2]), platform='cuda')\n"
        "print(out[0].sum())\n"
    )
    done = run("-c", script)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["triton", "xla", "8.0"]


def test_this_jax_has_pallas_triton():
    assert implementations.has_pallas_triton()
