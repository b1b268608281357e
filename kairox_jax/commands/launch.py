"""Start an engine from the command line: environment first, then JAX, then a line on what runs where."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from kairox_jax.commands.options import placement_config
from kairox_jax.nvidia import limit_device_memory

_CACHE_DIR = "JAX_COMPILATION_CACHE_DIR"
_CACHE_SWITCH = "JAX_ENABLE_COMPILATION_CACHE"
_CACHE_MIN_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


def prepare_environment(args: argparse.Namespace, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what JAX reads only once: the share of device memory, and the folder of compiled programs.

    Variables that the user has set stay as they are.

    Args:
        args: resolved flags; ``vram_budget`` is read.
        environ: changed in place.
    """
    if args.vram_budget is not None:
        limit_device_memory(args.vram_budget, environ=environ)
    if _CACHE_DIR not in environ and _CACHE_SWITCH not in environ:
        from kairox_jax.io import cache_folder

        environ[_CACHE_DIR] = str(cache_folder() / "compiled" / _cpu_tag())
        # A decode step is many small programs: JAX's default of one second would keep none of them.
        environ.setdefault(_CACHE_MIN_SECONDS, "0.05")


def start_engine(args: argparse.Namespace, engine_api: Any | None, *, parallel: int = 1) -> Any:
    """Open the model.

    Args:
        args: resolved flags of a subcommand with MODEL and PLACEMENT flags.
        engine_api: has ``Engine``; None takes ``kairox_jax.engine``.
        parallel: sequences that share a step.

    Returns:
        The engine; the caller closes it.
    """
    placement = placement_config(args)
    prepare_environment(args)
    if sys.stderr.isatty():
        note(args, f"loading {args.model} (the first start also compiles kernels, about half a minute)")
    engine = load_engine_api(engine_api).Engine(
        args.model,
        mode=args.mode,
        placement=placement,
        context_length=args.ctx_size,
        threads=args.threads,
        sparsity=args.sparsity,
        **({} if args.predictors is None else {"predictors": args.predictors}),
        **({} if parallel == 1 else {"parallel": parallel}),
    )
    note(args, engine.describe())
    return engine


def load_engine_api(engine_api: Any | None) -> Any:
    """Import ``kairox_jax.engine`` unless something stands in for it."""
    if engine_api is not None:
        return engine_api
    import kairox_jax.engine

    return kairox_jax.engine


def note(args: argparse.Namespace, line: str) -> None:
    """Tell the user something beside the result, unless --quiet."""
    if not args.quiet:
        print(f"kairox: {line}", file=sys.stderr, flush=True)


def _cpu_tag() -> str:
    """Name this kind of CPU: programs compiled for one must not run on another that shares the folder."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    model = next((line for line in text.splitlines() if line.startswith("model name")), "")
    return hashlib.sha256(f"{model}{flags}".encode()).hexdigest()[:12]
