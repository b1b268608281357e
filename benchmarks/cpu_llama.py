"""llama.cpp through llama-cpp-python, as ``bench_cpu_decode`` drives it. Imports neither JAX nor numba."""

from __future__ import annotations

import importlib
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.touched_bytes import TouchedBytes, cache_bytes, seen_positions

F16_BYTES = 2
BUILD = """\
llama.cpp is compared where llama-cpp-python is installed. Its default build crashes on some machines with
AMX; this one does not (10 minutes on 2 cores; leave out the AVX512 flags where /proc/cpuinfo has no avx512f):
  CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=ON \\
    -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON" python -m pip install llama-cpp-python"""


class LlamaRival:
    """llama.cpp with its measurements.

    Args:
        path: a GGUF file.
        threads: for prefill and decode alike.
        context: positions.
        weights_bytes: of all tensors in the file.
        cache_elements: numbers in the keys and values of one position, all layers.
    """

    def __init__(
        self, *, path: str, threads: int, context: int, weights_bytes: int, cache_elements: int
    ) -> None:
        self._library: Any = importlib.import_module("llama_cpp")  # optional: only this rival needs it
        begin = perf_counter()
        self.llama: Any = self._library.Llama(
            path,
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0,
            seed=0,
            verbose=False,
        )
        self.load_s = perf_counter() - begin
        self._weights_bytes, self._cache_elements = weights_bytes, cache_elements
        self._prompt_tokens = 0

    def facts(self) -> dict[str, Any]:
        """Describe what was loaded."""
        info = self._library.llama_print_system_info().decode()
        return {
            "load_s": self.load_s,
            "description": info.strip(),
            "versions": {"llama_cpp_python": self._library.__version__},
        }

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        """Run a prompt and choose one token."""
        self.llama.reset()
        begin = perf_counter()
        self.llama.eval(ids)
        self._best()
        return {"tokens_per_s": len(ids) / (perf_counter() - begin)}

    def decode(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Run a prompt and ``tokens`` decode steps."""
        self._prompt_tokens = len(ids)
        self.llama.reset()
        self.llama.eval(ids)
        token_ids = [self._best()]
        begin = perf_counter()
        for _ in range(tokens):
            self.llama.eval(token_ids[-1:])
            token_ids.append(self._best())
        return {"tokens_per_s": tokens / (perf_counter() - begin), "token_ids": token_ids}

    def counts(self, tokens: int) -> dict[str, Any]:
        """Tell what the last decode touched: every weight of the file, and the cache in float16."""
        seen = seen_positions(self._prompt_tokens, tokens)
        touched = TouchedBytes(
            other_weights=self._weights_bytes,
            host_neurons=0.0,
            device_neurons=0.0,
            kv_cache=cache_bytes(seen, self._cache_elements * F16_BYTES),
        )
        return {"touched_bytes": touched.to_json()}

    def parts(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Return nothing: llama.cpp is not clocked inside."""
        return {}

    def _best(self) -> int:
        logits = self._library.llama_get_logits_ith(self.llama.ctx, -1)
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(self.llama.n_vocab(),))))
