"""NVIDIA devices as the driver reports them, without JAX, and the memory limit that JAX must get in time.

XLA reads its share of the device's memory when it first touches the device, so the share has to be known
before that.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

MEM_FRACTION = "XLA_CLIENT_MEM_FRACTION"
_OLD_MEM_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # JAX refuses both at once


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device: its name, memory in bytes, and PCI address such as ``0000:01:00.0``."""

    name: str
    total_bytes: int
    free_bytes: int
    pci_address: str


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Pci(ctypes.Structure):
    _fields_ = [
        ("old_bus_id", ctypes.c_char * 16),
        *((name, ctypes.c_uint) for name in ("domain", "bus", "device", "device_id", "subsystem_id")),
        ("bus_id", ctypes.c_char * 32),
    ]


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """List the devices that JAX will be able to use, in its order.

    Args:
        environ: ``JAX_PLATFORMS`` and ``CUDA_VISIBLE_DEVICES`` are read.

    Returns:
        One entry a device; none without a driver, or where the environment hides them all.
    """
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.lower().split(",")):
        return []
    try:
        nvml = ctypes.CDLL("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    try:
        handles = _handles(nvml, environ.get("CUDA_VISIBLE_DEVICES"))
        return [_read(nvml, handle) for handle in handles]
    finally:
        nvml.nvmlShutdown()


def limit_device_memory(
    budget_bytes: int, *, gpus: list[Gpu] | None = None, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Hold JAX's share of the first GPU to a budget: set ``XLA_CLIENT_MEM_FRACTION`` while that still works.

    Does nothing without a GPU, or where the variable is set already. Warns where JAX has opened the device.

    Args:
        budget_bytes: the most device memory to use, in bytes.
        gpus: from ``visible_gpus``; None asks the driver.
        environ: the variable is set here.

    Raises:
        ValueError: the budget is above the device's memory.
    """
    gpus = visible_gpus(environ) if gpus is None else gpus
    if not gpus:
        return
    total_bytes = gpus[0].total_bytes
    if budget_bytes > total_bytes:
        raise ValueError(
            f"--vram-budget {budget_bytes / 1e9:.2f} GB is above the {total_bytes / 1e9:.2f} GB of "
            f"{gpus[0].name}: give less, or leave it out to use what is free"
        )
    if environ.get(MEM_FRACTION) or environ.get(_OLD_MEM_FRACTION):
        return
    fraction = f"{budget_bytes / total_bytes:.4f}"
    if _jax_has_opened_devices():
        warnings.warn(
            "JAX has opened the GPU already, so its memory pool can no longer be held to "
            f"{budget_bytes / 1e9:.2f} GB: set {MEM_FRACTION}={fraction} before the first JAX call",
            stacklevel=2,
        )
        return
    environ[MEM_FRACTION] = fraction


def _jax_has_opened_devices() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")  # JAX has no public way to ask without opening them
    return bridge is not None and bridge.backends_are_initialized()


def _handles(nvml: ctypes.CDLL, visible: str | None) -> list[ctypes.c_void_p]:
    """Handles of the devices in ``CUDA_VISIBLE_DEVICES``: indices or UUIDs, up to the first bad one."""
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    names = [str(index) for index in range(count.value)] if visible is None else visible.split(",")
    handles = []
    for name in names:
        handle = ctypes.c_void_p()
        name = name.strip()
        if name.isdigit():
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            failed = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        if failed:
            break
        handles.append(handle)
    return handles


def _read(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> Gpu:
    name, memory, pci = ctypes.create_string_buffer(96), _Memory(), _Pci()
    nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(96))
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    nvml.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci))
    return Gpu(
        name=name.value.decode(errors="replace"),
        total_bytes=memory.total,
        free_bytes=memory.free,
        pci_address=f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0",
    )
