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
