"""How an engine was set up: sizes, device and choices, and the words for what runs where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kairox_jax.config import ModelConfig
from kairox_jax.engine.hybrid import Hybrid
from kairox_jax.placement import BudgetPlan


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Facts of an engine that do not change.

    Attributes:
        config: of the model, with the activation that its thresholds make of it.
        mode: dense, exact or predicted.
        device: JAX's.
        context_length: positions of a sequence.
        parallel: sequences of a step, at most.
        plan: of the device's memory.
        threads: of the host's kernels.
        policy_name: None in dense mode.
        implementation: of the device kernels.
        slot_format: "packed" or "float32".
        host_activations: one of ``HOST_ACTIVATIONS``.
    """

    config: ModelConfig
    mode: str
    device: Any
    context_length: int
    parallel: int
    plan: BudgetPlan
    threads: int
    policy_name: str | None
    implementation: str
    slot_format: str
    host_activations: str

    def describe(self, hybrid: Hybrid | None) -> str:
        """Return one line: the device, and what runs where; without ``hybrid`` the device runs the whole model."""
        device = f"device {self.device.platform}:{self.device.device_kind}"
        if self.device.platform == "cpu":
            device = "no accelerator found: JAX's CPU backend is the device"
        most, kernels = (
            self.config.num_neurons,
            f"{self.threads} threads, {self.host_activations} activations",
        )
        if hybrid is None or self.mode == "dense":
            where = "on the device" if hybrid is None else f"by host kernels ({kernels})"
            return f"{device} | dense: all {most} neurons a layer, {where}"
        some, slots = "forecast" if self.mode == "predicted" else "active", self.plan.slots_per_layer
        neurons = (
            f"{slots} of {most} neurons a layer in {self.slot_format} device slots ({self.implementation} kernels), "
            f"the {some} rest on the host ({kernels}) | policy {self.policy_name}"
            if slots
            else f"the {some} of {most} neurons a layer on the host ({kernels}), none in a device slot"
        )
        link = hybrid.migrator.link.name
        return f"{device} | attention and output: {hybrid.dense.name} | {neurons}" + (
            "" if link == "device" else f" | link: {link}"
        )

    def placement(self, hybrid: Hybrid | None) -> dict[str, Any]:
        """Return what runs where, for the statistics; ``hybrid`` as above."""
        if hybrid is None:
            return {"dense_part": "device", "neurons": "device"}
        return {
            "dense_part": hybrid.dense.name,
            "neurons": "device slots and host" if hybrid.table.capacity.any() else "host",
            "slots_per_layer": hybrid.table.capacity.tolist(),
            "device_kernels": self.implementation,
            "slot_format": self.slot_format,
            "host_threads": self.threads,
            "host_activations": self.host_activations,
            "link": hybrid.migrator.link.name,
        }
