"""Where neurons live: the host's store, the device's slots, and the plan of a memory budget."""

from kairox_jax.placement.arena import Arena
from kairox_jax.placement.planner import BudgetPlan, Needs, plan_budget
from kairox_jax.placement.slot_arrays import (
    SlotArrays,
    commit_records,
    down_rows,
    empty_slots,
    resolve_slot_format,
    slot_bytes,
)
from kairox_jax.placement.slots import SlotTable
from kairox_jax.placement.store import NeuronStore, load_store, record_layouts
from kairox_jax.placement.unpack import unpack_records, unpack_rows

__all__ = [
    "Arena",
    "BudgetPlan",
    "Needs",
    "NeuronStore",
    "SlotArrays",
    "SlotTable",
    "commit_records",
    "down_rows",
    "empty_slots",
    "load_store",
    "plan_budget",
    "record_layouts",
    "resolve_slot_format",
    "slot_bytes",
    "unpack_records",
    "unpack_rows",
]
