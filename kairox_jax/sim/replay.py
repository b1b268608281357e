"""Replay of traces: one policy, one machine, one capacity; counts and times of each step and in total."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kairox_jax.balancing import Policy, initial_residents, make_policy, share_slots
from kairox_jax.io.trace import Trace
from kairox_jax.sim.events import Simulator, StepRecord
from kairox_jax.sim.guide_model import GuideModel
from kairox_jax.sim.machine import LayerCosts, layer_costs, load_machine
from kairox_jax.sim.models import DTYPE_BYTES, MODELS, ModelSpec, find_model

FORECASTS = ("perfect", "adjacent", "previous")


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """What a replay depends on beside the traces.

    Attributes:
        policy: key of ``kairox_jax.balancing.POLICIES``.
        params: of the policy.
        hardware: "guide", a profile's name, or the path of one.
        capacity: slots per layer: a whole number of the trace's neurons, or a share (float) of them.
        group_size: neurons of the trace that move together.
        as_model: key of ``MODELS``; None takes the model whose shape the trace has.
        dtype: of that model's weights.
        copies: "staged" or "per-record".
        queue_ms: transfers that may wait for the link.
        can_wait: a layer may wait for loads where its plan says so.
        forecast: "perfect" plans each layer one ahead from what it will compute; "adjacent" is the engine's way with
            predictors, "previous" that without: all layers before a step, from what the last one computed.
        max_moves: the most records that a plan loads; None leaves it to the queue.
        steps: the most steps of each trace; None for all.
        debug: check every plan.
    """

    policy: str
    params: dict[str, Any] = field(default_factory=dict)
    hardware: str = "guide"
    capacity: int | float = 0.25
    group_size: int = 1
    as_model: str | None = None
    dtype: str = "f16"
    copies: str = "staged"
    queue_ms: float = 4.0
    can_wait: bool = True
    forecast: str = "perfect"
    max_moves: int | None = None
    steps: int | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"--group-size {self.group_size} must be 1 or more")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"--dtype {self.dtype!r}: choose one of {', '.join(DTYPE_BYTES)}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"--steps {self.steps} must be 1 or more")
        if not self.queue_ms > 0:
            raise ValueError(f"--queue-ms {self.queue_ms} must be above zero")
        if self.forecast not in FORECASTS:
            raise ValueError(f"--forecast {self.forecast!r}: choose one of {', '.join(FORECASTS)}")
        if self.max_moves is not None and self.max_moves < 1:
            raise ValueError(f"--max-moves {self.max_moves} must be 1 or more")
        if self.hardware == "guide" and (self.forecast != "perfect" or self.max_moves is not None):
            raise ValueError(
                "--hardware guide counts a promotion in its own step, without a queue: leave --forecast and "
                "--max-moves out, or choose a profile"
            )


@dataclass(frozen=True)
class Result:
    """Records of all steps, the model that they stand for, and bytes of one record."""

    records: list[StepRecord]
    trace_names: list[str]
    scale: str
    record_bytes: float
    num_layers: int
    layer_scale: float

    def totals(self) -> dict[str, Any]:
        """Return sums and means over all steps."""
        ms = np.array([record.step_ms for record in self.records])
        total = {
            name: sum(getattr(record, name) for record in self.records)
            for name in ("active", "hits", "promoted", "evicted", "wasted", "late")
        }
        layer_steps = len(self.records) * self.num_layers
        return {
            "steps": len(self.records),
            "ms_per_token": float(ms.mean()),
            "p50_ms": float(np.percentile(ms, 50)),
            "p99_ms": float(np.percentile(ms, 99)),
            "hit_rate": total["hits"] / total["active"] if total["active"] else 0.0,
            "promotions": total["promoted"],
            "evictions": total["evicted"],
            "wasted_promotions": total["wasted"],
            "late": total["late"],
            "loads_per_layer_step": total["promoted"] / layer_steps,
            "link_bytes": round(total["promoted"] * self.record_bytes * self.layer_scale),
            "t_gpu_ms": float(np.mean([record.gpu_ms for record in self.records])),
            "t_io_ms": float(np.mean([record.io_ms for record in self.records])),
            "t_cpu_ms": float(np.mean([record.cpu_ms for record in self.records])),
        }

    def as_json(self) -> dict[str, Any]:
        """Return the object that ``kairox replay --json`` prints."""
        steps = []
        for index, (record, name) in enumerate(zip(self.records, self.trace_names, strict=True)):
            begin = self.trace_names.index(name)
            steps.append(
                {
                    "trace": name,
                    "step": index - begin + 1,
                    "hit_rate": record.hits / record.active if record.active else 0.0,
                    "hits": record.hits,
                    "residual": record.active - record.hits,
                    "promoted": record.promoted,
                    "evicted": record.evicted,
                    "t_gpu_ms": record.gpu_ms,
                    "t_io_ms": record.io_ms,
                    "t_cpu_ms": record.cpu_ms,
                    "step_ms": record.step_ms,
                    "modifier": record.report.get("modifier"),
                    **{key: value for key, value in record.report.items() if key != "modifier"},
                }
            )
        return {"steps": steps, "totals": self.totals(), "scale": self.scale}


def replay(traces: list[Trace], settings: ReplaySettings, priors: list[np.ndarray | None]) -> Result:
    """Serve each trace with a fresh policy and cache.

    Args:
        traces: of one model.
        settings: policy, machine, capacity.
        priors: activation frequencies [L, F] for each trace, or None for a neutral start.

    Raises:
        ValueError: settings that do not fit the traces.
    """
    records: list[StepRecord] = []
    names: list[str] = []
    scale, record_bytes, layer_scale = "", 0.0, 1.0
    for trace, prior in zip(traces, priors, strict=True):
        costs, scale = _costs(trace, settings)
        if costs is not None:
            record_bytes, layer_scale = costs.record_bytes, costs.layer_scale
        shown = [_counts(trace, step, settings.group_size) for step in range(_num_steps(trace, settings))]
        records += _run(trace, settings, _grouped_prior(prior, settings.group_size), costs, shown)
        names += [trace.name] * len(shown)
    return Result(records, names, scale, record_bytes, traces[0].num_layers, layer_scale)


def _num_steps(trace: Trace, settings: ReplaySettings) -> int:
    return min(trace.num_steps, settings.steps or trace.num_steps)


def _counts(trace: Trace, step: int, group_size: int) -> np.ndarray:
    """Return what is active: bool [L, F], or counts per group [L, F / group_size]."""
    active = trace.active(step)
    if group_size == 1:
        return active
    return active.reshape(trace.num_layers, -1, group_size).sum(2)


def _grouped_prior(prior: np.ndarray | None, group_size: int) -> np.ndarray | None:
    if prior is None or group_size == 1:
        return prior
    return prior.reshape(prior.shape[0], -1, group_size).mean(2)


def _costs(trace: Trace, settings: ReplaySettings) -> tuple[LayerCosts | None, str]:
    """Return the costs of a layer (None for the guide's model) and a sentence on the scale."""
    if trace.num_neurons % settings.group_size:
        raise ValueError(
            f"--group-size {settings.group_size} does not divide the trace's {trace.num_neurons} neurons"
        )
    if settings.hardware == "guide":
        if settings.as_model is not None:
            raise ValueError("--hardware guide has its own times: leave --as-model out, or choose a profile")
        return None, "the guide's cost model, neuron for neuron"
    name, model = _model_of(trace, settings)
    costs = layer_costs(
        load_machine(settings.hardware),
        model,
        trace_layers=trace.num_layers,
        trace_neurons=trace.num_neurons,
        group_size=settings.group_size,
        copies=settings.copies,
    )
    bundle = model.num_neurons / trace.num_neurons
    return costs, (
        f"as {name} in {settings.dtype}: each neuron of the trace stands for {bundle:g} neurons, "
        f"each layer for {costs.layer_scale:g} layers"
    )


def _model_of(trace: Trace, settings: ReplaySettings) -> tuple[str, ModelSpec]:
    if settings.as_model is not None:
        return settings.as_model, find_model(settings.as_model, settings.dtype)
    for name, spec in MODELS.items():
        if (spec.num_layers, spec.num_neurons) == (trace.num_layers, trace.num_neurons):
            return name, find_model(name, settings.dtype)
    raise ValueError(
        f"trace {trace.name}: no known model has {trace.num_layers} layers of {trace.num_neurons} neurons: "
        f"give --as-model ({', '.join(sorted(MODELS))})"
    )


def slots_per_layer(capacity: int | float, num_neurons: int) -> int:
    """Return slots for a whole number, or a share of the neurons.

    Raises:
        ValueError: outside 0..F, or 0..1 for a share.
    """
    if isinstance(capacity, float):
        if not 0 <= capacity <= 1:
            raise ValueError(f"--capacity {capacity} must be a share in 0..1, or a whole number of slots")
        return int(round(capacity * num_neurons))
    if not 0 <= capacity <= num_neurons:
        raise ValueError(f"--capacity {capacity} must be 0..{num_neurons} slots per layer, or a share")
    return capacity


def _run(
    trace: Trace,
    settings: ReplaySettings,
    prior: np.ndarray | None,
    costs: LayerCosts | None,
    shown: list[np.ndarray],
) -> list[StepRecord]:
    size = settings.group_size
    records, layers = trace.num_neurons // size, trace.num_layers
    policy = _policy(settings, shown)
    total = slots_per_layer(settings.capacity, trace.num_neurons) // size * layers
    dense = getattr(policy, "dense", False) and costs is not None
    if dense and costs is not None:  # the attention of a host layer frees its bytes for other layers
        whole = int((total + layers * costs.dense_slots) // (records + costs.dense_slots))
        total = min(whole, layers) * records
    shape = share_slots(policy, total, layers, records, prior)
    resident = initial_residents(policy, shape, prior)
    if costs is None:
        model = GuideModel(policy, shape, resident, prior, size, settings.debug)
        return [model.step(counts) for counts in shown]
    if dense:
        return [_dense_step(costs, counts, resident) for counts in shown]
    simulator = Simulator(
        policy,
        shape,
        resident,
        prior,
        costs,
        size,
        queue_ms=settings.queue_ms,
        can_wait=settings.can_wait,
        debug=settings.debug,
        forecast=settings.forecast,
        max_moves=settings.max_moves,
    )
    return [simulator.step(counts) for counts in shown]


def _policy(settings: ReplaySettings, shown: list[np.ndarray]) -> Policy:
    if settings.policy != "oracle":
        return make_policy(settings.policy, **settings.params)

    shares = [_share(counts, settings.group_size) for counts in shown]

    def future(step: int) -> np.ndarray | None:
        return shares[step] if step < len(shares) else None

    return make_policy("oracle", future=future, **settings.params)


def _share(counts: np.ndarray, group_size: int) -> np.ndarray:
    return counts if group_size == 1 else (counts / group_size).astype(np.float32)


def _dense_step(costs: LayerCosts, counts: np.ndarray, resident: np.ndarray) -> StepRecord:
    """Return a token of whole layers, each dense on its side, one after the other."""
    on_device = int(resident.all(1).sum())
    record = StepRecord(active=int(counts.sum()), hits=int(counts[resident].sum()))
    record.gpu_ms = on_device * costs.dense_gpu_ms * costs.layer_scale + costs.head_ms
    record.cpu_ms = (len(resident) - on_device) * costs.dense_cpu_ms * costs.layer_scale
    record.step_ms = record.gpu_ms + record.cpu_ms
    return record
