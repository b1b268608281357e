"""How host kernels are compiled, and where their machine code is kept.

numba keys its cache by signature, bytecode, triple, CPU name and CPU features, so a home folder shared by
different machines is safe. It does not see a change in a function that another file holds: the folder is
therefore named by a hash of all of this package's sources.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

from kairox_jax.host.threads import config

# Of a kernel that Python does not call: nothing is compiled that would let it.
_UNCALLED: dict[str, Any] = dict(no_cpython_wrapper=True, no_cfunc_wrapper=True)
# Sums may be reordered and multiply-adds fused. NaN and infinity keep their meaning: a NaN stays visible.
FAST = {"reassoc", "contract", "nsz"}


def cache_dir() -> Path:
    """Return the folder of compiled kernels: ``NUMBA_CACHE_DIR``, else the user's cache folder."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    base = os.environ.get("NUMBA_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "kairox"
    )
    return Path(base) / f"numba-{hashlib.sha256(sources).hexdigest()[:16]}"


_CACHE_DIR = str(cache_dir())


def _one_writer(dispatcher: Any) -> Any:
    """Let one process at a time add to a kernel's cache.

    numba numbers its files by an index that it reads before and writes after: of two processes that compile at once,
    one could otherwise find the other's machine code under its own signature.
    """
    file = dispatcher._cache._cache_file
    save = file.save

    def locked(key: Any, data: Any) -> None:
        with open(Path(file._cache_path) / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file gives it back
            save(key, data)

    file.save = locked
    return dispatcher


class _Inlined(JITCodeLibrary):
    """The code of an inner kernel: what calls it links it in, optimises the whole and makes machine code of it.

    numba would optimise every function anew with all that it calls, and make machine code of each, which nobody runs:
    half of the time that compiling took.
    """

    class _NoEnvironment:
        """Stands for the compiler's engine, which does not know this code."""

        @staticmethod
        def set_env(env_name: str, env: Any) -> None: ...

    @property
    def codegen(self) -> Any:
        return self._NoEnvironment

    def _optimize_final_module(self) -> None: ...

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0


class _InnerCompiler(Compiler):
    """Compiles for inlining alone."""

    def __init__(self, typingctx: Any, targetctx: Any, library: Any, *rest: Any) -> None:
        if library is None:
            library = _Inlined(targetctx.codegen(), "inner")
            library.enable_object_caching()
        super().__init__(typingctx, targetctx, library, *rest)


def kernel(*, parallel: bool = False, inner: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for this CPU when it is first called, without the GIL, and keep it on disk.

    Where no folder can be written the kernel is compiled anew in each process. ``inner``: only other kernels call it;
    it is part of what is kept of these, and machine code of its own would only take time to make.
    """
    options: dict[str, Any] = dict(
        nopython=True, nogil=True, parallel=parallel, fastmath=FAST, error_model="numpy", boundscheck=False
    )

    def wrap(function: Callable[..., Any]) -> Any:
        if inner:
            return numba.jit(**options, **_UNCALLED, pipeline_class=_InnerCompiler)(function)
        saved, config.CACHE_DIR = config.CACHE_DIR, _CACHE_DIR
        try:
            return _one_writer(numba.jit(cache=True, **options)(function))
        except RuntimeError:  # numba found no folder that it can write
            return numba.jit(**options)(function)
        finally:
            config.CACHE_DIR = saved

    return wrap
