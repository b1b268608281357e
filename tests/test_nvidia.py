"""The device-memory limit is set while it still works, and said to be too late where it is."""

import subprocess
import sys
from pathlib import Path

import pytest

from kairox_jax import nvidia
from kairox_jax.nvidia import MEM_FRACTION, Gpu, limit_device_memory, visible_gpus

GPU = Gpu(name="RTX 3080", total_bytes=10 * 10**9, free_bytes=9 * 10**9, pci_address="0000:01:00.0")
OTHER = Gpu(name="RTX 4090", total_bytes=24 * 10**9, free_bytes=9 * 10**9, pci_address="0000:02:00.0")


@pytest.fixture
def early(monkeypatch):
    """JAX has not opened the devices, whatever earlier tests did."""
    monkeypatch.setattr(nvidia, "_jax_has_opened_devices", lambda: False)


def test_share_of_the_first_gpu(early):
    environ: dict[str, str] = {}
    limit_device_memory(6 * 10**9, gpus=[GPU, OTHER], environ=environ)
    assert environ == {MEM_FRACTION: "0.6000"}


@pytest.mark.parametrize("name", [MEM_FRACTION, "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_the_users_own_setting_stays(early, name):
    environ = {name: "0.3"}
    limit_device_memory(6 * 10**9, gpus=[GPU], environ=environ)
    assert environ == {name: "0.3"}


def test_without_a_gpu_nothing_is_set(early):
    environ: dict[str, str] = {}
    limit_device_memory(6 * 10**9, gpus=[], environ=environ)
    assert environ == {}


def test_more_than_the_device_has(early):
    with pytest.raises(ValueError, match="11.00 GB is above the 10.00 GB of RTX 3080"):
        limit_device_memory(11 * 10**9, gpus=[GPU], environ={})


def test_too_late_warns_and_names_the_remedy():
    """In a process of its own: JAX is imported, then opened."""
    script = (
        "import warnings; warnings.simplefilter('error')\n"
        "import jax\nfrom kairox_jax.nvidia import Gpu, limit_device_memory\n"
        "gpu = Gpu(name='x', total_bytes=10**10, free_bytes=0, pci_address='')\n"
        "env = {}; limit_device_memory(5 * 10**9, gpus=[gpu], environ=env); print(env)\n"
        "jax.devices(); env = {}\n"
        "try:\n    limit_device_memory(5 * 10**9, gpus=[gpu], environ=env)\n"
        "except UserWarning as warning:\n    print(warning, env)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    first, second = done.stdout.splitlines()
    assert first == "{'XLA_CLIENT_MEM_FRACTION': '0.5000'}"
    assert "set XLA_CLIENT_MEM_FRACTION=0.5000 before the first JAX call {}" in second


def test_hidden_devices_are_not_listed():
    assert visible_gpus({"JAX_PLATFORMS": "cpu"}) == []


class FakeNvml:
    """The driver's library with two devices, filling in what it is handed by reference."""

    def nvmlInit_v2(self):  # noqa: N802
        return 0

    def nvmlShutdown(self):  # noqa: N802
        return 0

    def nvmlDeviceGetCount_v2(self, count):  # noqa: N802
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):  # noqa: N802
        handle._obj.value = index.value + 1
        return 0 if index.value < 2 else 2

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):  # noqa: N802
        handle._obj.value = 2
        return 0 if uuid == b"GPU-2" else 2

    def nvmlDeviceGetName(self, handle, name, length):  # noqa: N802
        name.value = b"card %d" % handle.value
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):  # noqa: N802
        memory._obj.total, memory._obj.free = handle.value * 10**9, 10**8
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle, pci):  # noqa: N802
        pci._obj.bus = 0x3F + handle.value
        return 0


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, ["card 1", "card 2"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["card 2"]),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, ["card 2", "card 1"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2"}, ["card 2"]),
        ({"CUDA_VISIBLE_DEVICES": "0,7,1"}, ["card 1"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"JAX_PLATFORMS": "cuda,cpu"}, ["card 1", "card 2"]),
    ],
)
def test_visible_devices_in_jaxs_order(monkeypatch, environ, names):
    monkeypatch.setattr(nvidia.ctypes, "CDLL", lambda name: FakeNvml())
    found = visible_gpus(environ)
    assert [gpu.name for gpu in found] == names
    assert [gpu.total_bytes for gpu in found] == [int(name[-1]) * 10**9 for name in names]
    if names == ["card 2"]:
        assert found[0].pci_address == "0000:41:00.0"
