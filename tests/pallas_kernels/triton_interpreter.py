"""Runs the Triton twins in Triton's own interpreter, with NumPy arrays where it expects torch tensors.

Prints one JSON line a case: the operation, the case and its error. A process of its own, because the
interpreter is chosen when a kernel is decorated: ``python triton_interpreter.py``.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("ignore")  # of Triton, about its own defaults
sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import kernel_oracle as oracle  # noqa: E402
import numpy as np  # noqa: E402
import test_gather_down as down_suite  # noqa: E402
import test_gather_gate_up as gate_up_suite  # noqa: E402

from pallas_kernels.gather_down import cases as down_cases  # noqa: E402
from pallas_kernels.gather_down import triton as gather_down  # noqa: E402
from pallas_kernels.gather_gate_up import cases as gate_up_cases  # noqa: E402
from pallas_kernels.gather_gate_up import triton as gather_gate_up  # noqa: E402
from pallas_kernels.triton_rows import Launch  # noqa: E402

TRITON_NAMES = {"float32": "fp32", "int32": "i32", "bfloat16": "bf16", "float16": "fp16", "int8": "i8"}
TRITON_NAMES["uint8"] = "u8"


class Dtype:
    """Named as torch names its dtypes, which is all that Triton reads of them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


class Storage:
    """The bytes behind a tensor; the interpreter works on them in place."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def cpu(self) -> Storage:
        return self

    def copy_(self, other: Storage) -> None:
        assert other is self


class Tensor:
    """What the interpreter asks of a torch tensor, over a NumPy array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = TRITON_NAMES[array.dtype.name]

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> Storage:
        self.storage = getattr(self, "storage", None) or Storage(self.array)
        return self.storage

    def new_empty(self, size: int, device: str) -> Tensor:
        return Tensor(self.array[:0])

    def set_(self, storage: Storage, *_: Any) -> None:
        self.storage, self.array = storage, storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> None:
        return None


def interpret(launch: Launch) -> np.ndarray:
    """Run every program of a launch; the output starts as NaN, so that what is not written shows."""
    out = np.full(launch.out.shape, np.nan, np.float32)
    arrays = [Tensor(np.array(a)) for a in launch.arrays]
    launch.kernel[launch.grid](*arrays, Tensor(out), **launch.constants)
    return out


def errors() -> Iterator[dict[str, Any]]:
    """Yield the error of each case against float64."""
    for case in gate_up_cases.CASES:
        inputs, threshold = gate_up_suite.drawn(case, np.random.default_rng(1))
        launch = gather_gate_up.launch(
            inputs["x"], inputs["stored"]["gate"], inputs["stored"]["up"], slots=inputs["slots"],
            n=inputs["n"], valid=None, rule=case.rule, threshold=np.float32(threshold),
            biases=(inputs["gate_bias"], inputs["up_bias"]) if case.biases else None,
        )  # fmt: skip
        out, expected = interpret(launch), oracle.gate_up(inputs, case.rule, threshold)
        same = bool(np.array_equal(out != 0, expected != 0))
        yield {"op": "gather_gate_up", "case": case.name, "dtype": case.dtype, "same_active": same,
               "error": oracle.relative_error(out, expected)}  # fmt: skip
    for case in down_cases.CASES:
        inputs = down_suite.drawn(case, np.random.default_rng(2))
        launch = gather_down.launch(
            inputs["values"], inputs["stored"], slots=inputs["slots"], n=inputs["n"], valid=None
        )
        out = interpret(launch).sum(axis=0)[:, : case.d]
        yield {"op": "gather_down", "case": case.name, "dtype": case.dtype, "same_active": True,
               "error": oracle.relative_error(out, down_suite.expected(inputs))}  # fmt: skip


if __name__ == "__main__":
    for line in errors():
        print(json.dumps(line), flush=True)
