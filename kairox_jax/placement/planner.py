"""The budget planner: what each part of a model takes of the device's memory, and how many slots are left."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kairox_jax.config import ModelConfig, PlacementConfig

FLOAT_BYTES = 4
REMEDY = "raise --vram-budget, or lower --ctx-size or --gpu-cache-neurons"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a model needs of the device apart from slots, in bytes.

    Attributes:
        dense_bytes: embedding, attention, norms, output matrix, and the scales that down columns share.
        predictor_bytes: predictors on the device, in ``predicted`` mode.
        cache_bytes: keys and values of the whole context.
        workspace_bytes: activations, streamed layers of the prefill, staging buffers.
        runtime_bytes: what the driver and the compiler's runtime keep for themselves.
        slot_bytes: one neuron in the slot arrays, the mean over layers.
    """

    dense_bytes: int
    predictor_bytes: int = 0
    cache_bytes: int
    workspace_bytes: int
    runtime_bytes: int
    slot_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """Bytes of everything but slots."""
        return (
            self.dense_bytes
            + self.predictor_bytes
            + self.cache_bytes
            + self.workspace_bytes
            + self.runtime_bytes
        )


@dataclass(frozen=True, kw_only=True)
class BudgetPlan:
    """Where the bytes go, and why.

    Attributes:
        needs: bytes of each fixed part.
        slots_per_layer: C.
        num_layers: L.
        num_neurons: F.
        budget_bytes: the limit, or None.
        reason: one line: what decided the number of slots.
    """

    needs: Needs
    slots_per_layer: int
    num_layers: int
    num_neurons: int
    budget_bytes: int | None
    reason: str

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots_per_layer * self.num_layers * self.needs.slot_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of everything."""
        return self.needs.fixed_bytes + self.slot_bytes

    def to_json(self) -> dict[str, int | None]:
        """Return the bytes of each part, the total and the limit."""
        needs = self.needs
        return {
            "dense_weights": needs.dense_bytes,
            "predictors": needs.predictor_bytes,
            "kv_cache": needs.cache_bytes,
            "workspace": needs.workspace_bytes,
            "runtime": needs.runtime_bytes,
            "slots": self.slot_bytes,
            "total": self.total_bytes,
            "limit": self.budget_bytes,
        }

    def table(self) -> str:
        """Return the plan as lines of text."""
        rows = [
            f"  {name.replace('_', ' '):<15}{size / 1e6:>11.1f} MB"
            for name, size in self.to_json().items()
            if size
        ]
        share = 100 * self.slots_per_layer / self.num_neurons
        rows.append(
            f"  {self.slots_per_layer} of {self.num_neurons} neurons a layer have a slot ({share:.0f} %): {self.reason}"
        )
        return "\n".join(rows)


def plan_budget(
    config: ModelConfig,
    placement: PlacementConfig,
    needs: Needs,
    *,
    device_free_bytes: int | None,
    remedy: str = REMEDY,
    what: str | None = None,
) -> BudgetPlan:
    """Decide how many slots each layer gets.

    Args:
        config: sizes of the model.
        placement: the caller's budget and number of slots.
        needs: bytes of the fixed parts.
        device_free_bytes: free memory of the accelerator, or None where there is none.
        remedy: what the caller can do about a budget that is too small.
        what: names, for that message, what should fit; None says it by the slots asked for.

    Returns:
        The plan.

    Raises:
        ValueError: the budget exceeds the device, is too small for the fixed parts, or for the slots that were
            asked for; more slots than neurons. The message holds the plan's table.
    """
    budget, asked = placement.vram_budget_bytes, placement.gpu_cache_neurons
    if asked is not None and asked > config.num_neurons:
        raise ValueError(
            f"--gpu-cache-neurons {asked}: a layer of this model has {config.num_neurons} neurons; "
            "ask for at most that"
        )
    limit = device_free_bytes if budget is None else budget
    room = None if limit is None else (limit - needs.fixed_bytes) // (config.num_layers * needs.slot_bytes)

    def made(slots: int, reason: str) -> BudgetPlan:
        return BudgetPlan(
            needs=needs,
            slots_per_layer=slots,
            num_layers=config.num_layers,
            num_neurons=config.num_neurons,
            budget_bytes=limit,
            reason=reason,
        )

    least = made(asked or 0, "asked for" if asked else "the least there can be")
    if budget is not None and device_free_bytes is not None and budget > device_free_bytes:
        raise ValueError(
            f"--vram-budget {budget / 1e6:.1f} MB exceeds the device's free memory of "
            f"{device_free_bytes / 1e6:.1f} MB: name a smaller budget or free the device\n{least.table()}"
        )
    if room is not None and room < (asked or 0):
        what = what or (f"{asked} slots a layer" if asked else "the dense part")
        raise ValueError(
            f"a budget of {limit or 0:,} bytes is too small for {what}: it needs at least "
            f"{math.ceil(least.total_bytes / 1e5) / 10:.1f} MB; {remedy}\n{least.table()}"
        )
    if asked is not None:
        return made(asked, "as --gpu-cache-neurons asks")
    if room is not None:
        whole = room >= config.num_neurons
        return made(min(room, config.num_neurons), "all of them fit" if whole else "what the budget leaves")
    return made(
        0,
        "without an accelerator host kernels are faster; --gpu-cache-neurons N or --vram-budget tries slots",
    )
