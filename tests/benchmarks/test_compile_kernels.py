"""The kernels as machine code, where the triton package is: no spills in the cases that had some."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compile_kernels

HAS_TRITON = importlib.util.find_spec("triton") is not None
SAVED = Path(__file__).parents[2] / "benchmarks/results/compile_kernels.json"
# Each of these spilled with larger tiles; the last is the form of a GGUF down matrix.
TIGHT = [
    ("gather_gate_up_relu", "q4_0", 8, 86),
    ("gather_gate_up_relu", "q8_0", 8, 86),
    ("twin_gather_gate_up_relu", "float32", 2, 90),
    ("gather_down_atomic", "q4_0", 4, 90),
    ("gather_down_two_pass", "q4_0", 1, 90),
    ("gather_down_two_pass", "q4_1_column", 8, 86),
]


@pytest.mark.skipif(not HAS_TRITON, reason="the triton package is not installed")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(("op", "dtype", "batch", "arch"), TIGHT)
def test_tight_kernels_compile_without_spills(op: str, dtype: str, batch: int, arch: int) -> None:
    (row,) = compile_kernels.compile_all((arch,), (dtype,), (batch,), (op,))
    assert (row.op, row.dtype, row.batch, row.arch) == (op, dtype, batch, f"sm_{arch}")
    assert 0 < row.registers <= 255 and row.spill_bytes == 0


@pytest.mark.skipif(HAS_TRITON, reason="the triton package is installed")
def test_without_triton_it_says_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_kernels.main([]) == 3
    assert "pip install triton" in capsys.readouterr().err


def test_the_table_is_made_from_the_saved_json() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "benchmarks.compile_kernels", "--table", str(SAVED)],
        capture_output=True, text=True, check=True, cwd=SAVED.parents[2],
    ).stdout  # fmt: skip
    assert out.startswith("| operation | rows | batch |") and len(out.splitlines()) > 20


def test_one_operation_of_a_saved_report_is_renewed(tmp_path: Path) -> None:
    saved = tmp_path / "report.json"
    old = [{"op": op, "registers": 1} for op in ("gather_gate_up_silu", "gather_down_atomic", "slot_scatter")]
    saved.write_text(json.dumps(old))
    compile_kernels.renew(saved, [{"op": "gather_down_atomic", "registers": 2}], ["gather_down_atomic"])
    assert json.loads(saved.read_text()) == [old[0], {"op": "gather_down_atomic", "registers": 2}, old[2]]


def test_the_saved_report_is_of_all_cases_and_nothing_spills() -> None:
    rows = json.loads(SAVED.read_text())
    wanted = {
        (op, dtype, batch, f"sm_{arch}")
        for op in (*compile_kernels.operations(), *compile_kernels.TWINS)
        for dtype in compile_kernels.DTYPES
        if "gather_down" in op or not dtype.endswith("_column")
        for batch in (compile_kernels.BATCHES if op != "slot_scatter" else (1,))
        for arch in compile_kernels.ARCHS
    }
    assert {(row["op"], row["dtype"], row["batch"], row["arch"]) for row in rows} == wanted
    assert len(rows) == len(wanted) and not any(row["spill_bytes"] for row in rows)
