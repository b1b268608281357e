"""What a placement policy is: the shapes, costs and times that it sees and the plan that it gives.

Engine and simulator call the same three functions. NumPy only: no JAX, no clock, no threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Float, Int, Int32, Shaped

Active = Bool[np.ndarray, " F"] | Float[np.ndarray, " F"]
Resident = Bool[np.ndarray, " F"]
Prior = Float[np.ndarray, "L F"]


@dataclass(frozen=True, eq=False)
class Shape:
    """Sizes that a policy works on.

    Attributes:
        num_layers: L.
        num_neurons: F, neurons of each layer.
        capacity: int64 [L], device slots of each layer; one int stands for every layer.
    """

    num_layers: int
    num_neurons: int
    capacity: Int[np.ndarray, " L"]

    def __init__(self, num_layers: int, num_neurons: int, capacity: int | Int[np.ndarray, " L"]) -> None:
        if num_layers <= 0 or num_neurons <= 0:
            raise ValueError(f"shape of {num_layers} layers x {num_neurons} neurons: both must be above zero")
        slots = np.asarray(capacity)
        if slots.dtype.kind not in "iu" or slots.shape not in ((), (num_layers,)):
            raise ValueError(
                f"capacity is {slots.dtype}{list(slots.shape)}: give one whole number, or one for each of "
                f"the {num_layers} layers"
            )
        slots = np.array(np.broadcast_to(slots, num_layers), np.int64)
        if slots.min() < 0 or slots.max() > num_neurons:
            raise ValueError(
                f"capacity {slots.min()}..{slots.max()} slots: must lie in 0..{num_neurons}, "
                "the neurons of a layer"
            )
        slots.flags.writeable = False
        for name, value in (("num_layers", num_layers), ("num_neurons", num_neurons), ("capacity", slots)):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What moving and computing costs for one layer now, as measured or as a hardware profile says.

    The defaults (free link and processors, no window) suit policies that look at activations alone.

    Attributes:
        max_moves: the most records that this plan may load (queue and staging buffer).
        free_slots: slots of this layer that a load can take without an eviction.
        gpu_ms_per_record: device time that one more hit adds to this layer.
        cpu_ms_per_record: host time that one more residual adds to this layer.
        link_ms_per_record: transfer time of one record within a larger transfer.
        link_ms_fixed: transfer time that a plan pays once, however few records it loads.
        window_ms: from now until this layer's FFN starts, less what the link must first finish; records
            that arrive within it are hits of this step, later ones are residual (or waited for). May be
            negative: the link is still busy when the FFN starts.
        can_wait: the executor can hold a layer back until the first ``Plan.wait`` loads are there.
        gpu_ms_second: device time of the second pass over records that were waited for.
        cpu_ms_fixed: host time of this layer's FFN without any residual, paid when there is one.
        record_bytes: bytes of one record.
        step_ms_fixed: what any load adds to the step itself, however early it arrives: it is taken into its slot
            between two computations.
        step_ms_per_record: what one more record adds to that, where the link shares the host's cores.
        foreseen: what is active is what the layer will compute next; else what it computed in the last step.
    """

    max_moves: int
    free_slots: int
    gpu_ms_per_record: float = 0.0
    cpu_ms_per_record: float = 0.0
    link_ms_per_record: float = 0.0
    link_ms_fixed: float = 0.0
    window_ms: float = 0.0
    can_wait: bool = False
    gpu_ms_second: float = 0.0
    cpu_ms_fixed: float = 0.0
    record_bytes: int = 0
    step_ms_fixed: float = 0.0
    step_ms_per_record: float = 0.0
    foreseen: bool = True

    def __post_init__(self) -> None:
        if self.max_moves < 0 or self.free_slots < 0:
            raise ValueError(
                f"max_moves {self.max_moves} and free_slots {self.free_slots} must not be negative"
            )


@dataclass(frozen=True)
class Times:
    """Measured times of one layer, or of a whole step, in ms.

    Attributes:
        gpu_ms: device: attention and the hits.
        io_ms: link: the transfers that were decided.
        cpu_ms: host: the residual.
    """

    gpu_ms: float
    io_ms: float
    cpu_ms: float


class _Moves(NamedTuple):
    load: Int32[np.ndarray, " n"]
    evict: Int32[np.ndarray, " m"]


class Plan(_Moves):
    """The pair (load, evict) of one layer and step.

    Attributes:
        load: int32 ids to load: the executor sends them in this order, so the best come first where some will be late.
        evict: int32 ids to evict; all of them leave, or as many as the executor needs.
        wait: so many of the first loads are waited for before the layer's device part runs; 0, the rule,
            leaves what is late to the host (as does an executor that cannot wait). Not part of the pair.
    """

    wait: int

    def __new__(cls, load: Int[np.ndarray, " n"], evict: Int[np.ndarray, " m"], wait: int = 0) -> Plan:
        plan = super().__new__(cls, np.asarray(load, np.int32), np.asarray(evict, np.int32))
        plan.wait = int(wait)
        return plan


NOTHING = Plan(np.empty(0, np.int32), np.empty(0, np.int32))


class Policy(Protocol):
    """Where neurons live: three functions over a state that only the policy reads.

    A state may own NumPy arrays and update them in place: a state that was passed in must not be used
    again, only the returned one (as with donated arguments). Parameters are the constructor's.
    """

    def init(self, shape: Shape, prior: Prior | None) -> Any:
        """Return the state before the first step; ``prior`` holds activation frequencies in 0..1 [L, F]."""
        ...

    def plan(
        self, state: Any, layer: int, active: Active, resident: Resident, costs: Costs
    ) -> tuple[Any, Plan]:
        """Decide the moves of one layer before its FFN runs; called once a layer and step, in any order.

        Args:
            state: of ``init`` or the last call.
            layer: 0..L-1.
            active: what this layer will compute: bool [F], or float32 [F] shares of the sequences in 0..1.
            resident: bool [F]: holds a slot, or is on its way to one.
            costs: of this layer now.
        """
        ...

    def feedback(self, state: Any, layer: int | None, times: Times) -> Any:
        """Take the times of one layer (where they are known) or, with None, once a step, of the step."""
        ...


def check_plan(plan: Plan, shape: Shape, layer: int, resident: Resident, costs: Costs) -> None:
    """Check every invariant of a plan: for tests and for the engine's debug flag.

    Raises:
        ValueError: a plan that no executor could carry out; says which rule is broken.
    """
    load, evict = plan.load, plan.evict
    slots, held = int(shape.capacity[layer]), int(np.count_nonzero(resident))
    ids = np.concatenate([load, evict])
    outside = ids.size and (ids.min() < 0 or ids.max() >= shape.num_neurons)
    broken = [
        (bool(outside), f"ids outside 0..{shape.num_neurons - 1}"),
        (np.unique(ids).size != ids.size, "an id appears twice in load and evict"),
        (not outside and bool(resident[load].any()), "loads a resident neuron"),
        (not outside and not resident[evict].all(), "evicts a neuron that is not resident"),
        (load.size > costs.max_moves, f"loads {load.size} records, more than max_moves {costs.max_moves}"),
        (
            load.size > costs.free_slots + evict.size,
            f"loads {load.size} into {costs.free_slots} free and {evict.size} evicted slots",
        ),
        (
            load.size > 0 and held - evict.size + load.size > slots,
            f"{held} - {evict.size} + {load.size} residents exceed the {slots} slots",
        ),
        (not 0 <= plan.wait <= load.size, f"waits for {plan.wait} of {load.size} loads"),
    ]
    for is_broken, rule in broken:
        if is_broken:
            raise ValueError(f"plan of layer {layer}: {rule}; the policy is at fault")


def as_share(active: Shaped[np.ndarray, " F"]) -> Float[np.ndarray, " F"]:
    """Return ``active`` as float32 shares (bool: 0 or 1)."""
    return active if active.dtype == np.float32 else active.astype(np.float32)
