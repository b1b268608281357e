"""The cache of compiled kernels, with processes that fill it at the same time."""

import os
import subprocess
import sys

MODULE = """
import time
import numpy as np
from kairox_jax.host.compile import kernel

@kernel()
def twice(x):
    return x + x

def slow(write):
    def wrapped(*args):
        time.sleep(0.7)  # the other process is in the same place meanwhile
        return write(*args)
    return wrapped

file = twice._cache._cache_file
file._save_index, file._save_data = slow(file._save_index), slow(file._save_data)
"""


def command(folder, words):
    path = os.pathsep.join([str(folder), os.getcwd()])
    env = os.environ | {"NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": path}
    return {"args": [sys.executable, "-c", f"from made import *; {words}"], "env": env}


def test_processes_that_compile_at_once_find_their_own_code(tmp_path):
    (tmp_path / "made.py").write_text(MODULE)
    calls = ["np.float32(1.5)", "np.int64(2)", "np.array([1.0, 2.0])"]
    writers = [subprocess.Popen(**command(tmp_path, f"twice({call})")) for call in calls]
    assert [writer.wait(300) for writer in writers] == [0, 0, 0]
    words = f"print(*[twice(v) for v in ({','.join(calls)})], sum(twice.stats.cache_hits.values()))"
    read = subprocess.run(**command(tmp_path, words), capture_output=True, text=True, timeout=300, check=True)
    assert read.stdout.strip() == "3.0 4 [2. 4.] 3"


INNER = """
import numpy as np
from kairox_jax.host.compile import kernel

@kernel(inner=True)
def doubled(x, out):
    for i in range(x.shape[0]):
        out[i] = 2 * x[i]

@kernel(inner=True)
def shifted(x, out, by):
    doubled(x, out)
    for i in range(x.shape[0]):
        out[i] += by if by >= 0 else out[i - 1]

@kernel()
def run(x, out, by):
    shifted(x, out, by)
    doubled(out, out)
"""


def test_inner_kernels_are_part_of_what_is_kept(tmp_path):
    (tmp_path / "made.py").write_text(INNER)
    words = "out = np.zeros(3); run(np.arange(3.0), out, 1.0); print(*out, *(len(k.overloads) for k in (run, doubled)))"
    for compiled in (1, 0):  # the second process reads machine code, and compiles nothing
        read = subprocess.run(
            **command(tmp_path, words), capture_output=True, text=True, timeout=300, check=True
        )
        assert read.stdout.split() == ["2.0", "6.0", "10.0", "1", str(compiled)], read.stderr
        assert "Warning" not in read.stderr


def test_inner_kernels_have_no_machine_code_of_their_own(tmp_path):
    (tmp_path / "made.py").write_text(INNER)
    words = (
        "run(np.arange(3.0), np.zeros(3), 1.0); (made,) = doubled.overloads.values(); "
        "print(made.library.get_pointer_to_function(made.fndesc.llvm_func_name))"
    )
    read = subprocess.run(**command(tmp_path, words), capture_output=True, text=True, timeout=300, check=True)
    assert read.stdout.strip() == "0"
