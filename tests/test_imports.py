"""Imports run one way (docs/architecture.md), and only the outer packages know time and threads."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A package may import those of a lower or of its own rank; packages of one rank must not form a circle.
RANKS = {
    "pallas_kernels": 0,
    "kairox_jax.config": 1,
    "kairox_jax.nvidia": 1,
    "kairox_jax.quant": 2,
    "kairox_jax.io": 2,
    "kairox_jax.placement": 2,
    "kairox_jax.balancing": 2,
    "kairox_jax.host": 3,
    "kairox_jax.models": 3,
    "kairox_jax.engine": 4,
    "kairox_jax.sim": 5,
    "kairox_jax.server": 5,
    "kairox_jax.commands": 5,
    "kairox_jax.cli": 6,
    "kairox_jax.__main__": 7,
    "kairox_jax": 6,
    "training": 7,
    "benchmarks": 8,
}
CLOCK_AND_THREADS = {"time", "threading", "concurrent", "multiprocessing", "asyncio", "queue", "sched"}
MAY_TIME = {"kairox_jax.engine", "kairox_jax.server", "kairox_jax.commands", "kairox_jax.cli"}
MAY_TIME |= {"training", "benchmarks"}
# Neither measures time nor starts a thread.
EXCEPTIONS = {
    ("kairox_jax.host.threads", "threading"): "a lock around numba's parallel regions",
    ("kairox_jax.io.wheel", "time"): "sleeps between looks at a download's progress",
}
JAX = {"jax", "jaxlib", "flax"}


def package_of(module: str) -> str | None:
    """The entry of RANKS that a module or a name in it belongs to; None where it is not ours.

    What the table lacks under kairox_jax is a name of the facade, as in `from kairox_jax import Engine`.
    """
    parts = module.split(".")
    return next((name for n in (2, 1) if (name := ".".join(parts[:n])) in RANKS), None)


def imported(module: str, is_package: bool, source: str) -> Iterator[str]:
    """Every module that a source imports, also inside functions and by a literal `import_module`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=name, names=names, level=level):
                parts = module.split(".")
                parent = parts[: len(parts) - level + is_package] if level else []
                base = ".".join(parent + ([name] if name else []))
                if base == "kairox_jax":
                    yield from (f"{base}.{alias.name}" for alias in names)
                else:
                    yield base
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(function) in ("importlib.import_module", "import_module", "__import__"):
                    yield name


def read_tree(root: Path) -> dict[str, tuple[bool, str]]:
    """Module name -> (is it a package's __init__, its source), for all of our packages."""
    tree = {}
    for top in ("pallas_kernels", "kairox_jax", "training", "benchmarks"):
        for path in sorted((root / top).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            tree[".".join(parts[:-1] if is_package else parts)] = (is_package, path.read_text())
    return tree


def violations(tree: dict[str, tuple[bool, str]]) -> list[str]:
    """One line for each import that a module should not have, and for each circle within a rank."""
    found = []
    edges: dict[str, set[str]] = {name: set() for name in RANKS}
    for module, (is_package, source) in tree.items():
        home = package_of(module)
        if home is None or (home == "kairox_jax" and module != home):
            found.append(f"{module}: no rank in tests/test_imports.py")
            continue
        for name in imported(module, is_package, source):
            top, target = name.split(".")[0], package_of(name)
            if top in CLOCK_AND_THREADS and home not in MAY_TIME and (module, top) not in EXCEPTIONS:
                found.append(f"{module} imports {name}: only {', '.join(sorted(MAY_TIME))} may")
            if top in JAX and home == "kairox_jax.balancing":
                found.append(f"{module} imports {name}: balancing is NumPy only")
            if target is None or target == home:
                continue
            if RANKS[target] > RANKS[home]:
                found.append(f"{module} imports {name}: upward")
            elif RANKS[target] == RANKS[home]:
                edges[home].add(target)
    return found + [f"{name} imports itself by way of others" for name in edges if reaches(name, edges)]


def reaches(start: str, edges: dict[str, set[str]]) -> bool:
    """Whether a package is reachable from itself."""
    seen: set[str] = set()
    todo = list(edges[start])
    while todo:
        name = todo.pop()
        if name == start:
            return True
        if name not in seen:
            seen.add(name)
            todo += edges[name]
    return False


def test_imports_run_one_way():
    tree = read_tree(ROOT)
    assert {"kairox_jax.config", "kairox_jax.engine.sampling", "pallas_kernels"} <= set(tree)
    assert violations(tree) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pallas_kernels.gather.api", "import kairox_jax.config"),
        ("pallas_kernels.gather.api", "from kairox_jax import config"),
        ("pallas_kernels.gather.api", "import time"),
        ("kairox_jax.quant.formats", "from kairox_jax.host import kernels"),
        ("kairox_jax.io.gguf", "from ..models import decoder"),
        ("kairox_jax.io.gguf", "def f():\n    from kairox_jax import Engine"),
        ("kairox_jax.io.gguf", "from kairox_jax import load_model"),
        ("kairox_jax.placement.store", "import importlib\nimportlib.import_module('kairox_jax.engine')"),
        ("kairox_jax.balancing.guide", "import jax.numpy as jnp"),
        ("kairox_jax.balancing.guide", "from time import perf_counter"),
        ("kairox_jax.host.ffn", "from concurrent.futures import ThreadPoolExecutor"),
        ("kairox_jax.models.decoder", "import threading"),
        ("kairox_jax.engine", "from .. import commands"),
        ("kairox_jax.engine.decode", "from ..server.api import app"),
        ("kairox_jax.sim.run", "import time"),
        ("kairox_jax.commands.generate", "from kairox_jax import cli"),
        ("kairox_jax.surprise.thing", "import math"),
        ("training.thresholds", "import benchmarks.common"),
    ],
)
def test_a_planted_violation_is_found(module, source):
    assert len(violations({module: (module.count(".") == 1, source)})) == 1


def test_a_circle_within_a_rank_is_found():
    tree = {
        "kairox_jax.io.gguf": (False, "import kairox_jax.quant.formats"),
        "kairox_jax.quant.formats": (False, "import kairox_jax.placement.store"),
        "kairox_jax.placement.store": (False, "from kairox_jax.io import gguf"),
    }
    assert len(violations(tree)) == 3


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kairox_jax.engine.decode", "import time, threading\nimport pallas_kernels.gather"),
        ("kairox_jax.io.gguf", "from kairox_jax.quant.formats import unpack\nimport jax"),
        ("kairox_jax.placement.store", "from ..config import PlacementConfig"),
        ("training.thresholds", "from kairox_jax import Engine, load_model\nimport time"),
        ("benchmarks.decode", "import training.thresholds, kairox_jax, time"),
        ("kairox_jax.cli", "from kairox_jax.commands import generate"),
    ],
)
def test_allowed_imports_pass(module, source):
    assert violations({module: (False, source)}) == []


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports test files by their base name: two alike stop the whole run."""
    names = [path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
