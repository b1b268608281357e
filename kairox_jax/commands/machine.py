"""What the operating system says of the machine, read from /proc and /sys; no JAX, no external program.

Each function takes the root folder, so that tests can show it another machine. A file that is not there
(another system, a container) gives None or an empty list, never an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_NVIDIA, _DISPLAY_CLASS = "0x10de", "0x03"
# GT/s -> (PCIe generation, GB/s a lane and direction after line coding)
_GENERATIONS = {
    2.5: (1, 0.25),
    5.0: (2, 0.5),
    8.0: (3, 0.985),
    16.0: (4, 1.969),
    32.0: (5, 3.938),
    64.0: (6, 7.563),
}


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """Model name, physical cores, and the instruction sets that matter here."""

    model: str
    cores: int
    features: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Link:
    """A PCIe link as (GT/s, lanes), now and at most; None where the system does not say."""

    address: str
    now: tuple[float, int] | None
    most: tuple[float, int] | None


def read_cpu(root: Path = ROOT) -> Cpu | None:
    """Read /proc/cpuinfo."""
    text = _read(root / "proc/cpuinfo")
    if text is None:
        return None
    fields = [line.partition(":") for line in text.splitlines()]
    values = [(name.strip(), value.strip()) for name, _, value in fields]
    flags = set(next((value for name, value in values if name in ("flags", "Features")), "").split())
    cores, package = set(), "0"
    for name, value in values:
        package = value if name == "physical id" else package
        if name == "core id":
            cores.add((package, value))
    model = next((value for name, value in values if name == "model name"), "unknown")
    processors = sum(name == "processor" for name, _ in values)
    return Cpu(model=model, cores=len(cores) or processors, features=_features(flags))


def read_memory(root: Path = ROOT) -> tuple[int, int] | None:
    """Bytes of RAM in all and available now, within the container's limit where one is set."""
    text = _read(root / "proc/meminfo")
    if text is None:
        return None
    kilobytes = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    total, available = kilobytes["MemTotal"] * 1024, kilobytes["MemAvailable"] * 1024
    limit = _read(root / "sys/fs/cgroup/memory.max")
    if limit and limit.isdigit() and int(limit) < total:
        used = _read(root / "sys/fs/cgroup/memory.current") or "0"
        total, available = int(limit), min(available, int(limit) - int(used))
    return total, available


def read_cpu_limit(root: Path = ROOT) -> float | None:
    """CPUs that the container may use at once; None without a limit."""
    quota, _, period = (_read(root / "sys/fs/cgroup/cpu.max") or "max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def read_numa_nodes(root: Path = ROOT) -> dict[str, str]:
    """Node name -> its CPUs, such as ``{"node0": "0-7"}``."""
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    return {node.name: _read(node / "cpulist") or "" for node in nodes}


def read_driver(root: Path = ROOT) -> str | None:
    """Version of the loaded NVIDIA driver, such as ``550.54.14``."""
    text = _read(root / "proc/driver/nvidia/version") or ""
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else None


def read_links(root: Path = ROOT) -> list[Link]:
    """PCIe links of the NVIDIA display and compute devices."""
    links = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _read(device / "vendor") == _NVIDIA and (_read(device / "class") or "").startswith(_DISPLAY_CLASS):
            now, most = (_link(device, prefix) for prefix in ("current", "max"))
            links.append(Link(address=device.name, now=now, most=most))
    return links


def link_text(link: tuple[float, int] | None) -> str:
    """Say a link as ``PCIe 3.0 x8 (7.9 GB/s)``."""
    if link is None:
        return "unknown"
    speed, lanes = link
    if speed not in _GENERATIONS:
        return f"{speed:g} GT/s x{lanes}"
    generation, lane_gb_per_s = _GENERATIONS[speed]
    return f"PCIe {generation}.0 x{lanes} ({lane_gb_per_s * lanes:.1f} GB/s)"


def _features(flags: set[str]) -> tuple[str, ...]:
    sets = {
        "AVX": {"avx"},
        "AVX2": {"avx2", "fma"},
        "AVX-512": {"avx512f", "avx512bw", "avx512vl"},
        "AVX-512 VNNI": {"avx512_vnni"},
        "AMX": {"amx_tile", "amx_int8"},
        "NEON": {"asimd"},
        "SVE": {"sve"},
    }
    return tuple(name for name, needed in sets.items() if needed <= flags)


def _link(device: Path, prefix: str) -> tuple[float, int] | None:
    speed = re.match(r"([\d.]+) GT/s", _read(device / f"{prefix}_link_speed") or "")
    lanes = _read(device / f"{prefix}_link_width") or ""
    return (float(speed[1]), int(lanes)) if speed and lanes.isdigit() and int(lanes) > 0 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
