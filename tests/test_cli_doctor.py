"""`kairox doctor`: other machines shown as folders, and the judgement of each finding."""

import json
import platform
import sys

import pytest

from kairox_jax.cli import main
from kairox_jax.commands import checks, machine
from kairox_jax.commands.doctor import probe, report
from kairox_jax.nvidia import Gpu

RTX = Gpu(name="RTX 3080", total_bytes=10 * 10**9, free_bytes=9 * 10**9, pci_address="0000:01:00.0")
ON_GPU = [["gpu", "NVIDIA RTX 3080", 7_500_000_000]]
ON_CPU = [["cpu", "cpu", None]]


@pytest.fixture
def root(tmp_path):
    """Write files below a root folder that stands for another machine."""

    def write(**files: str):
        for path, text in files.items():
            file = tmp_path / path.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        return tmp_path

    return write


def cpuinfo(flags: str) -> str:
    """Two packages of two cores with two threads each."""
    return "\n\n".join(
        f"processor\t: {n}\nmodel name\t: Test CPU\nphysical id\t: {n // 4}\n"
        f"core id\t: {n // 2 % 2}\nflags\t: {flags}"
        for n in range(8)
    )


def pci(root, **overrides: str):
    device = {
        "vendor": "0x10de",
        "class": "0x030000",
        "current_link_speed": "16.0 GT/s PCIe",
        "current_link_width": "16",
        "max_link_speed": "16.0 GT/s PCIe",
        "max_link_width": "16",
    } | overrides
    return root(**{f"sys__bus__pci__devices__0000:01:00.0__{name}": text for name, text in device.items()})


def test_cpu(root):
    cpu = machine.read_cpu(root(proc__cpuinfo=cpuinfo("fpu avx avx2 fma avx512f avx512bw avx512vl amx_tile")))
    assert cpu == machine.Cpu(model="Test CPU", cores=4, features=("AVX", "AVX2", "AVX-512"))
    arm = "processor : 0\nFeatures : fp asimd sve\n\nprocessor : 1\nFeatures : fp asimd sve"
    cpu = machine.read_cpu(root(proc__cpuinfo=arm))
    assert cpu == machine.Cpu(model="unknown", cores=2, features=("NEON", "SVE"))


def test_memory_and_the_containers_limit(root):
    folder = root(proc__meminfo="MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB")
    assert machine.read_memory(folder) == (1_024_000, 614_400)
    root(sys__fs__cgroup__memory__max="x")
    (folder / "sys/fs/cgroup/memory.max").write_text("500000\n")
    (folder / "sys/fs/cgroup/memory.current").write_text("100000\n")
    assert machine.read_memory(folder) == (500_000, 400_000)
    (folder / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert machine.read_memory(folder) == (1_024_000, 614_400)


@pytest.mark.parametrize(("text", "expected"), [("max 100000", None), ("150000 100000", 1.5), ("", None)])
def test_cpu_limit(tmp_path, text, expected):
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(text)
    assert machine.read_cpu_limit(tmp_path) == expected


def test_numa_nodes_in_order(root):
    folder = root(
        sys__devices__system__node__node10__cpulist="8-9",
        sys__devices__system__node__node2__cpulist="0-7",
        sys__devices__system__node__possible="0-10",
    )
    assert list(machine.read_numa_nodes(folder).items()) == [("node2", "0-7"), ("node10", "8-9")]


def test_driver_version(root):
    text = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 2024\nGCC version: gcc 12.2.0"
    )
    assert machine.read_driver(root(proc__driver__nvidia__version=text)) == "550.54.14"
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build"
    assert machine.read_driver(root(proc__driver__nvidia__version=text)) == "570.124.06"


def test_links(root):
    pci(root, current_link_speed="8.0 GT/s PCIe", current_link_width="8")
    folder = root(**{"sys__bus__pci__devices__0000:02:00.0__vendor": "0x8086"})
    (link,) = machine.read_links(folder)
    assert link == machine.Link(address="0000:01:00.0", now=(8.0, 8), most=(16.0, 16))
    assert machine.link_text(link.now) == "PCIe 3.0 x8 (7.9 GB/s)"
    assert machine.link_text(link.most) == "PCIe 4.0 x16 (31.5 GB/s)"


def test_link_that_the_system_does_not_know(root):
    (link,) = machine.read_links(pci(root, current_link_speed="Unknown", current_link_width="0"))
    assert link.now is None and machine.link_text(link.now) == "unknown"


def test_sound_device_of_the_card_is_no_gpu(root):
    assert machine.read_links(pci(root, **{"class": "0x040300"})) == []


def test_a_machine_that_tells_nothing(tmp_path):
    assert machine.read_cpu(tmp_path) is None
    assert machine.read_memory(tmp_path) is None
    assert machine.read_numa_nodes(tmp_path) == {}
    assert machine.read_driver(tmp_path) is None
    assert machine.read_links(tmp_path) == []
    assert [check.name for check in checks.check_host(tmp_path)] == ["system"]


@pytest.mark.parametrize(
    ("flags", "status"), [("fpu", "broken"), ("avx", "note"), ("avx avx2 fma", "ok"), ("avx avx2", "note")]
)
def test_cpu_features_are_judged(root, monkeypatch, flags, status):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    found = {check.name: check for check in checks.check_host(root(proc__cpuinfo=cpuinfo(flags)))}
    assert found["cpu"].status == status
    assert bool(found["cpu"].remedy) == (status != "ok")


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.10.1", False),
        ("0.10.2", True),
        ("0.11.0", False),
        ("0.11.1", False),
        ("0.11.2", True),
        ("0.12.0.1", True),
        ("0.13.0", False),
        ("0.12.1.dev20", True),
    ],
)
def test_jax_versions(version, fits):
    assert checks.jax_is_supported(version) == fits


def gpu_checks(monkeypatch, *, links=(), driver=None, gpus=(), devices=ON_CPU, packages=None):
    monkeypatch.setattr(checks, "installed", lambda name: (packages or {}).get(name))
    return {check.name: check for check in checks.check_gpu(list(links), driver, list(gpus), devices)}


LINK = machine.Link(address="0000:01:00.0", now=(16.0, 16), most=(16.0, 16))
PLUGIN = {"jax-cuda12-plugin": "0.10.2", "jax-triton": "0.4.1"}


def test_no_gpu_is_a_note(monkeypatch):
    found = gpu_checks(monkeypatch)
    assert [check.status for check in found.values()] == ["note"]
    assert "--gpus all" in found["gpu"].remedy


def test_a_complete_gpu_is_ok(monkeypatch):
    found = gpu_checks(
        monkeypatch, links=[LINK], driver="550.54.14", gpus=[RTX], devices=ON_GPU, packages=PLUGIN
    )
    assert {check.status for check in found.values()} == {"ok"}
    assert found["gpu"].value == "RTX 3080, 10.0 GB, 9.0 GB free"


@pytest.mark.parametrize(
    ("settings", "name", "remedy"),
    [
        ({"driver": None, "gpus": []}, "driver", "install NVIDIA's driver"),
        ({"driver": "470.1.2"}, "driver", "525 or newer"),
        ({"gpus": []}, "driver", "nvidia-smi"),
        ({"packages": {}}, "jax cuda plugin", "kairox-jax[cuda]"),
        ({"devices": ON_CPU}, "jax cuda plugin", "JAX does not open the GPU"),
        ({"devices": "fails with status 1: boom"}, "jax cuda plugin", "JAX does not open the GPU"),
        ({"packages": {"jax-cuda12-plugin": "0.10.2"}}, "jax-triton", "kairox-jax[cuda]"),
    ],
)
def test_each_missing_piece_has_its_remedy(monkeypatch, settings, name, remedy):
    for variable in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(variable, raising=False)
    whole = {"links": [LINK], "driver": "550.54.14", "gpus": [RTX], "devices": ON_GPU, "packages": PLUGIN}
    found = gpu_checks(monkeypatch, **{**whole, **settings})
    assert found[name].status == "missing"
    assert remedy in found[name].remedy


def test_hidden_devices_name_the_variable(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    found = gpu_checks(monkeypatch, links=[LINK], driver="550.54.14", packages=PLUGIN)
    assert found["driver"].remedy == "unset CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("now", "remedy"),
    [((16.0, 8), "fewer lanes"), ((2.5, 16), "idle card"), (None, "does not show")],
)
def test_slow_links_are_noted(monkeypatch, now, remedy):
    link = machine.Link(address="0000:01:00.0", now=now, most=(16.0, 16))
    check = gpu_checks(monkeypatch, links=[link], driver="550.54.14", gpus=[RTX])["link 0000:01:00.0"]
    assert check.status == "note" and remedy in check.remedy


def test_numba_layers(monkeypatch):
    monkeypatch.delenv("NUMBA_THREADING_LAYER", raising=False)
    assert checks.check_numba(["omp", "workqueue"]).status == "ok"
    assert checks.check_numba(["workqueue"]).status == "note"
    assert checks.check_numba("fails with status 1").status == "broken"


def test_jax_that_does_not_start_is_broken(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    check = checks.check_jax("fails with status 1: no TPU")
    assert check.status == "broken" and "JAX_PLATFORMS=tpu" in check.remedy


def test_probe():
    assert probe("import json; print('noise'); print(json.dumps([1]))") == [1]
    assert probe("raise SystemExit('boom')") == "fails with status 1: boom"
    assert probe("import os; os.abort()") == "fails with status -6: no message"


def test_report_and_status(monkeypatch, capsys):
    found = [
        checks.Check(name="a", value="1"),
        checks.Check(name="bb", value="2", status="broken", remedy="mend"),
    ]
    assert list(report(found)) == [
        "ok       a   1",
        "broken   bb  2",
        "             -> mend",
        "",
        "kairox cannot run: bb",
    ]
    monkeypatch.setattr("kairox_jax.commands.doctor.examine", lambda: found)
    assert main(["doctor"]) == 1
    assert main(["doctor", "--json"]) == 1
    out = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(out)["ok"] is False
    monkeypatch.setattr("kairox_jax.commands.doctor.examine", lambda: found[:1])
    assert main(["doctor"]) == 0


def test_this_machine(capsys):
    assert main(["doctor", "--json"]) == 0
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["python"]["value"] == platform.python_version()
    assert found["jax"]["value"] == sys.modules["jax"].__version__
    assert all(check["remedy"] for check in found.values() if check["status"] != "ok")


def test_packages(monkeypatch):
    versions = {"jax": "0.11.0", "jaxlib": "0.12.0", "flax": "0.12.8", "numpy": "2.2", "numba": "0.62"}
    monkeypatch.setattr(checks, "installed", versions.get)
    found = {check.name: check for check in checks.check_packages()}
    assert found["jax"].status == "broken" and '"jax>=0.10.2' in found["jax"].remedy
    assert found["jaxlib"].status == found["numpy"].status == found["python"].status == "ok"
    assert found["gguf"].status == "broken" and found["gguf"].remedy == "pip install kairox-jax"


def test_an_old_python_is_broken(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    (check, *_) = checks.check_packages()
    assert check.status == "broken" and "3.11" in check.remedy


def test_little_memory_and_numa_are_noted(root):
    folder = root(
        proc__meminfo="MemTotal: 4000000 kB\nMemAvailable: 1000000 kB",
        sys__devices__system__node__node0__cpulist="0-3",
        sys__devices__system__node__node1__cpulist="4-7",
    )
    found = {check.name: check for check in checks.check_host(folder)}
    assert found["memory"].status == "note" and "1.5 GB" in found["memory"].remedy
    assert found["numa"].status == "note" and "node1: cpus 4-7" in found["numa"].value


def test_a_containers_cpu_limit_is_noted(root):
    folder = root(proc__cpuinfo=cpuinfo("avx avx2 fma"))
    (folder / "sys/fs/cgroup").mkdir(parents=True)
    (folder / "sys/fs/cgroup/cpu.max").write_text("50000 100000\n")
    found = {check.name: check for check in checks.check_host(folder)}
    assert found["threads"].status == "note" and found["threads"].remedy.endswith("pass -t 1")
