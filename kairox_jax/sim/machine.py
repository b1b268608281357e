"""Hardware profiles, and what one layer costs on such a machine.

A profile is a JSON file in ``profiles/`` (or a path); each number there stands beside its source.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path

from kairox_jax.sim.models import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine as the simulator sees it.

    Attributes:
        name: of the profile.
        gpu_gb_per_s: peak bandwidth of device memory.
        gpu_efficiency: share of it that matrix-vector kernels reach.
        gpu_layer_us: device time that a layer takes beside reading weights (launches, norms, merge).
        link_gb_per_s: what a long host to device copy reaches.
        link_call_us: what every copy call adds.
        host_gb_per_s: peak bandwidth of host memory.
        host_dense_efficiency: share of it that dense matrix-vector products reach.
        host_sparse_efficiency: share of it that products with scattered rows reach.
        host_layer_us: host time that a layer's residual takes beside reading weights (wake-up, merge).
    """

    name: str
    gpu_gb_per_s: float
    gpu_efficiency: float
    gpu_layer_us: float
    link_gb_per_s: float
    link_call_us: float
    host_gb_per_s: float
    host_dense_efficiency: float
    host_sparse_efficiency: float
    host_layer_us: float


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Times of one simulated layer, in ms; a record is one neuron or group of the trace.

    Attributes:
        attention_ms: device: everything of a layer but the FFN.
        gpu_ms_per_neuron, cpu_ms_per_neuron: one active neuron of the trace, computed there.
        gpu_ms_second: a second pass over records that were waited for.
        cpu_ms_fixed: host, once a layer with residual.
        link_ms_fixed: once a plan with loads.
        link_ms_per_record: one record.
        head_ms: output matrix and sampling, once a token.
        record_bytes: bytes of one record.
        layer_scale: layers of the model that one layer of the trace stands for.
        dense_gpu_ms, dense_cpu_ms: a whole layer, every neuron, on one side.
        dense_slots: slots of one layer that its attention is worth in bytes.
    """

    attention_ms: float
    gpu_ms_per_neuron: float
    cpu_ms_per_neuron: float
    gpu_ms_second: float
    cpu_ms_fixed: float
    link_ms_fixed: float
    link_ms_per_record: float
    head_ms: float
    record_bytes: float
    layer_scale: float
    dense_gpu_ms: float
    dense_cpu_ms: float
    dense_slots: float


def profile_names() -> list[str]:
    """Return the names of the profiles that come with the package."""
    folder = resources.files("kairox_jax.sim") / "profiles"
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_machine(name_or_path: str) -> Machine:
    """Read a profile by its name, or from a JSON file of the same form.

    Raises:
        ValueError: no such profile, or a field is missing, unknown, not positive or without a source.
    """
    text = _profile_text(name_or_path)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"profile {name_or_path}: no JSON ({error})") from None
    wanted = {f.name for f in fields(Machine)} - {"name"}
    given = set(content) - {"name", "description"}
    if wanted != given:
        raise ValueError(
            f"profile {name_or_path}: missing {sorted(wanted - given)}, unknown {sorted(given - wanted)}"
        )
    values: dict[str, float] = {}
    for key in wanted:
        entry = content[key]
        if not isinstance(entry, dict) or not entry.get("source") or "value" not in entry:
            raise ValueError(f'profile {name_or_path}: {key} must be {{"value": number, "source": text}}')
        value = entry["value"]
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise ValueError(f"profile {name_or_path}: {key} is {value!r}, expected a number of 0 or more")
        if value == 0 and not key.endswith("_us"):
            raise ValueError(f"profile {name_or_path}: {key} must be above zero")
        values[key] = float(value)
    return Machine(name=content.get("name", name_or_path), **values)


def _profile_text(name_or_path: str) -> str:
    if name_or_path in profile_names():
        return (resources.files("kairox_jax.sim") / "profiles" / f"{name_or_path}.json").read_text()
    if not Path(name_or_path).is_file():
        raise ValueError(
            f"hardware {name_or_path!r}: choose guide, {', '.join(profile_names())}, or the path of a profile"
        )
    try:
        return Path(name_or_path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(
            f"profile {name_or_path}: no text, so no JSON: name a profile, or its JSON file"
        ) from None


def layer_costs(
    machine: Machine,
    model: ModelSpec,
    *,
    trace_layers: int,
    trace_neurons: int,
    group_size: int = 1,
    copies: str = "staged",
    context: int = 1024,
) -> LayerCosts:
    """Return what a layer of the trace costs when it stands for the model's layers.

    A neuron of the trace is a bundle of F_model / F_trace neurons of the model, and a layer of the trace
    stands for L_model / L_trace of its layers.

    Args:
        machine: profile.
        model: shapes and dtype.
        trace_layers, trace_neurons: L and F of the trace.
        group_size: neurons of the trace that move together.
        copies: "staged" sends a plan with one copy call, "per-record" each record with its own.
        context: tokens whose keys and values attention reads.

    Raises:
        ValueError: unknown ``copies``.
    """
    if copies not in ("staged", "per-record"):
        raise ValueError(f"copies {copies!r}: choose staged or per-record")
    bundle = model.num_neurons / trace_neurons
    neuron_bytes = model.record_bytes * bundle
    gpu_bytes_per_ms = machine.gpu_gb_per_s * machine.gpu_efficiency * 1e6
    host_bytes_per_ms = machine.host_gb_per_s * 1e6
    link_bytes_per_ms = machine.link_gb_per_s * 1e6
    layer_bytes = model.attention_bytes + model.kv_bytes(context)
    ffn_bytes = model.record_bytes * model.num_neurons
    call_ms, staged = machine.link_call_us * 1e-3, copies == "staged"
    return LayerCosts(
        attention_ms=layer_bytes / gpu_bytes_per_ms + machine.gpu_layer_us * 1e-3,
        gpu_ms_per_neuron=neuron_bytes / gpu_bytes_per_ms,
        cpu_ms_per_neuron=neuron_bytes / (host_bytes_per_ms * machine.host_sparse_efficiency),
        gpu_ms_second=machine.gpu_layer_us * 1e-3 / 3,  # two of a layer's six launches
        cpu_ms_fixed=machine.host_layer_us * 1e-3,
        link_ms_fixed=call_ms if staged else 0.0,
        link_ms_per_record=neuron_bytes * group_size / link_bytes_per_ms + (0.0 if staged else call_ms),
        head_ms=model.head_bytes / gpu_bytes_per_ms + machine.gpu_layer_us * 1e-3,
        record_bytes=neuron_bytes * group_size,
        layer_scale=model.num_layers / trace_layers,
        dense_gpu_ms=(layer_bytes + ffn_bytes) / gpu_bytes_per_ms + machine.gpu_layer_us * 1e-3,
        dense_cpu_ms=(layer_bytes + ffn_bytes) / (host_bytes_per_ms * machine.host_dense_efficiency)
        + machine.host_layer_us * 1e-3,
        dense_slots=layer_bytes / (neuron_bytes * group_size),
    )
