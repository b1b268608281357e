"""Profiles are complete and sourced; the costs of a layer follow from bytes over bandwidth."""

import json
from pathlib import Path

import pytest

from kairox_jax.sim.machine import layer_costs, load_machine, profile_names
from kairox_jax.sim.models import MODELS, find_model


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_loads_and_every_number_has_its_source(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name and machine.host_sparse_efficiency < machine.host_dense_efficiency < 1


def test_the_named_profiles_are_there() -> None:
    assert {"pc-low", "pc-high", "rtx4070-pcie4", "rtx3060-pcie3"} <= set(profile_names())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu_gb_per_s": None}, "missing"),
        ({"speed": {"value": 1, "source": "x"}}, "unknown"),
        ({"link_gb_per_s": {"value": 1}}, "source"),
        ({"link_gb_per_s": {"value": "fast", "source": "x"}}, "number"),
        ({"link_gb_per_s": {"value": -1, "source": "x"}}, "number"),
        ({"link_gb_per_s": {"value": 0, "source": "x"}}, "above zero"),
    ],
)
def test_wrong_profiles_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    names = [field for field in load_machine("pc-low").__dataclass_fields__ if field != "name"]
    content = {field: {"value": 1.0, "source": "test"} for field in names} | change
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    with pytest.raises(ValueError, match=message):
        load_machine(str(path))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    path.write_bytes(b"\x93NUMPY\xff\xfe")
    with pytest.raises(ValueError, match="no text, so no JSON"):
        load_machine(str(path))


def test_unknown_hardware_lists_the_profiles() -> None:
    with pytest.raises(ValueError, match=r"'gtx'.*guide.*pc-low"):
        load_machine("gtx")


def test_costs_of_llama_13b_on_pc_low() -> None:
    machine, model = load_machine("pc-low"), find_model("llama-13b")
    costs = layer_costs(machine, model, trace_layers=30, trace_neurons=1536)
    bundle_bytes = 9 * 3 * 5120 * 2
    assert costs.record_bytes == bundle_bytes and costs.layer_scale == pytest.approx(40 / 30)
    assert costs.link_ms_per_record == pytest.approx(bundle_bytes / 12.0e9 * 1e3)
    assert costs.link_ms_fixed == pytest.approx(5.4e-3)
    assert costs.cpu_ms_per_neuron == pytest.approx(bundle_bytes / (51.2e9 * 0.273) * 1e3)
    attention = 4 * 5120 * 5120 * 2 + 2 * 1024 * 5120 * 2
    assert costs.attention_ms == pytest.approx(attention / (912.4e9 * 0.75) * 1e3 + 0.03)
    assert costs.dense_slots == pytest.approx(attention / bundle_bytes)


def test_copies_per_record_give_the_papers_effective_bandwidth() -> None:
    """3.3 GB/s for one neuron of a 7B model and 10.8 for 24 on PC-Low; 5.8 and 22.3 on PC-High."""
    for name, single, grouped in (("pc-low", 3.3, 10.8), ("pc-high", 5.8, 22.3)):
        for size, expected in ((1, single), (24, grouped)):
            costs = layer_costs(
                load_machine(name),
                find_model("llama-7b"),
                trace_layers=32,
                trace_neurons=11008,
                group_size=size,
                copies="per-record",
            )
            assert costs.record_bytes / costs.link_ms_per_record / 1e6 == pytest.approx(expected, rel=0.02)


def test_dtype_scales_every_byte() -> None:
    half, quarter = find_model("llama-7b"), find_model("llama-7b", "q4_0")
    assert quarter.record_bytes / half.record_bytes == pytest.approx(18 / 64)
    assert set(MODELS) >= {"llama-7b", "llama-13b", "opt-30b"}
    with pytest.raises(ValueError, match="llama-13b"):
        find_model("llama-1b")
