"""What `kairox doctor` judges: each function turns findings into lines with a status and a remedy."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kairox_jax.commands import machine
from kairox_jax.nvidia import Gpu

INSTALL = "pip install kairox-jax"
INSTALL_CUDA = "pip install 'kairox-jax[cuda]'"
NEEDED_BYTES = 1_500_000_000  # of RAM for the default model
OLDEST_CUDA12_DRIVER = 525
BROKEN_JAX = {(0, 11, 0), (0, 11, 1)}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report.

    ``status`` is ok, note (worth knowing), missing (something optional), or broken (kairox cannot run).
    """

    name: str
    value: str
    status: str = "ok"
    remedy: str = ""


def check_host(root: Path) -> Iterable[Check]:
    """CPU, threads, memory and NUMA nodes."""
    yield Check(name="system", value=f"{platform.system()} {platform.release()} {platform.machine()}")
    cpu = machine.read_cpu(root)
    if cpu is not None:
        value = f"{cpu.model}: {', '.join(cpu.features) or 'no vector instructions known to kairox'}"
        yield Check(name="cpu", value=value, **_judge_features(cpu.features))
        yield _check_threads(cpu.cores, machine.read_cpu_limit(root))
    if (memory := machine.read_memory(root)) is not None:
        total, available = memory
        value = f"{total / 1e9:.1f} GB, {available / 1e9:.1f} GB available"
        if available < NEEDED_BYTES:
            remedy = f"the default model takes up to {NEEDED_BYTES / 1e9:.1f} GB: close other programs"
            yield Check(name="memory", value=value, status="note", remedy=remedy)
        else:
            yield Check(name="memory", value=value)
    nodes = machine.read_numa_nodes(root)
    if len(nodes) > 1:
        value = ", ".join(f"{name}: cpus {cpus}" for name, cpus in nodes.items())
        remedy = "host work is faster within one node: numactl --cpunodebind=0 --membind=0 kairox ..."
        yield Check(name="numa", value=f"{len(nodes)} nodes ({value})", status="note", remedy=remedy)
    elif nodes:
        yield Check(name="numa", value="1 node")


def check_packages() -> Iterable[Check]:
    """Python and the packages that kairox needs."""
    python = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield Check(name="python", value=python)
    else:
        yield Check(name="python", value=python, status="broken", remedy="use Python 3.11, 3.12 or 3.13")
    for name in ("jax", "jaxlib", "flax", "numpy", "numba", "gguf", "tokenizers"):
        found = installed(name)
        if found is None:
            yield Check(name=name, value="not installed", status="broken", remedy=INSTALL)
        elif name in ("jax", "jaxlib") and not jax_is_supported(found):
            remedy = f'pip install "{name}>=0.10.2,<0.13,!=0.11.0,!=0.11.1"'
            yield Check(name=name, value=f"{found} is not supported", status="broken", remedy=remedy)
        else:
            yield Check(name=name, value=found)


def jax_is_supported(text: str) -> bool:
    """Whether a version of jax or jaxlib is in the range of pyproject.toml."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", text)[:3])
    return (0, 10, 2) <= numbers < (0, 13) and numbers not in BROKEN_JAX


def check_numba(layers: Any) -> Check:
    """numba's threading layers; ``layers`` as ``probe`` returns it."""
    if isinstance(layers, str):
        return Check(
            name="numba threads", value=layers, status="broken", remedy=f"reinstall numba: {INSTALL}"
        )
    value = f"{', '.join(layers) or 'none'} available"
    if wanted := os.environ.get("NUMBA_THREADING_LAYER"):
        value += f"; NUMBA_THREADING_LAYER={wanted}"
    if {"tbb", "omp"} & set(layers):
        return Check(name="numba threads", value=value)
    remedy = "concurrent callers abort in workqueue: pip install tbb, or install libgomp1"
    return Check(name="numba threads", value=value, status="note", remedy=remedy)


def check_jax(devices: Any) -> Check:
    """The devices that JAX opens; ``devices`` as ``probe`` returns it."""
    if isinstance(devices, str):
        return Check(name="jax devices", value=devices, status="broken", remedy=_jax_remedy())
    return Check(
        name="jax devices",
        value=", ".join(
            f"{kind} ({platform_name})" + (f", pool of {limit / 1e9:.1f} GB" if limit else "")
            for platform_name, kind, limit in devices
        ),
    )


def check_gpu(
    links: list[machine.Link], driver: str | None, gpus: list[Gpu], devices: Any
) -> Iterable[Check]:
    """NVIDIA hardware, driver, JAX's plugin and jax-triton, each in its turn."""
    for gpu in gpus:
        value = f"{gpu.name}, {gpu.total_bytes / 1e9:.1f} GB, {gpu.free_bytes / 1e9:.1f} GB free"
        yield Check(name="gpu", value=value)
    for link in links:
        yield _check_link(link)
    if not links and not gpus and driver is None:
        remedy = "kairox runs on the CPU; in a container that should see a GPU, start it with --gpus all"
        yield Check(name="gpu", value="no NVIDIA device found", status="note", remedy=remedy)
        return
    yield _check_driver(driver, gpus)
    yield _check_plugin(devices)
    triton = installed("jax-triton")
    if triton is None:
        yield Check(
            name="jax-triton", value="not installed (optional)", status="missing", remedy=INSTALL_CUDA
        )
    else:
        yield Check(name="jax-triton", value=triton)


def installed(name: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _judge_features(features: tuple[str, ...]) -> dict[str, str]:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return {}
    if "AVX" not in features:
        return {
            "status": "broken",
            "remedy": "jaxlib needs AVX: use a newer CPU, or another virtual CPU model",
        }
    if "AVX2" not in features:
        return {"status": "note", "remedy": "without AVX2 the host kernels run, but slowly"}
    return {}


def _check_threads(cores: int, limit: float | None) -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    value = f"{usable} usable, {cores} cores"
    if limit is not None and limit < usable:
        remedy = f"the container may use {limit:g} CPUs: pass -t {max(1, int(limit))}"
        return Check(name="threads", value=value, status="note", remedy=remedy)
    return Check(name="threads", value=value)


def _check_link(link: machine.Link) -> Check:
    name = f"link {link.address}"
    value = f"{machine.link_text(link.now)} of {machine.link_text(link.most)}"
    if link.now is None or link.most is None:
        return Check(
            name=name, value=value, status="note", remedy="the system does not show it; lspci -vv as root may"
        )
    if link.now[1] < link.most[1]:
        remedy = "fewer lanes than the card has, so promotions are slower: try the slot nearest the CPU"
        return Check(name=name, value=value, status="note", remedy=remedy)
    if link.now[0] < link.most[0]:
        remedy = "an idle card lowers its speed; if it stays so under load, check the slot and the BIOS"
        return Check(name=name, value=value, status="note", remedy=remedy)
    return Check(name=name, value=value)


def _check_driver(driver: str | None, gpus: list[Gpu]) -> Check:
    if driver is None:
        remedy = (
            "install NVIDIA's driver (525 or newer) and load it; in a container, start it with --gpus all"
        )
        return Check(name="driver", value="not loaded", status="missing", remedy=remedy)
    if int(driver.split(".")[0]) < OLDEST_CUDA12_DRIVER:
        remedy = f"CUDA 12 needs {OLDEST_CUDA12_DRIVER} or newer: update NVIDIA's driver"
        return Check(name="driver", value=driver, status="missing", remedy=remedy)
    if not gpus:
        hidden = [name for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS") if name in os.environ]
        remedy = f"unset {' and '.join(hidden)}" if hidden else "check that nvidia-smi lists the device"
        return Check(
            name="driver", value=f"{driver}, but no device is visible", status="missing", remedy=remedy
        )
    return Check(name="driver", value=driver)


def _check_plugin(devices: Any) -> Check:
    found = {name: installed(name) for name in ("jax-cuda12-plugin", "jax-cuda13-plugin")}
    found = {name: text for name, text in found.items() if text is not None}
    if not found:
        return Check(name="jax cuda plugin", value="not installed", status="missing", remedy=INSTALL_CUDA)
    value = ", ".join(f"{name} {text}" for name, text in found.items())
    if not isinstance(devices, str) and any(platform_name == "gpu" for platform_name, *_ in devices):
        return Check(name="jax cuda plugin", value=value)
    remedy = f"JAX does not open the GPU: {_jax_remedy()}"
    return Check(name="jax cuda plugin", value=value, status="missing", remedy=remedy)


def _jax_remedy() -> str:
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return f"JAX_PLATFORMS={platforms} is set: unset it, or name what this machine has"
    return f"reinstall so that jax, jaxlib and the plugin match: {INSTALL_CUDA}"
