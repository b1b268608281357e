"""Where neurons live: the host's store, the device's slots, and the plan of a memory budget."""

from kairox_jax.placement.planner import BudgetPlan, Needs, plan_budget
from kairox_jax.placement.slots import SlotArrays, SlotTable, commit_records, empty_slots, slot_bytes
from kairox_jax.placement.store import NeuronStore, load_store, record_layout
from kairox_jax.placement.unpack import unpack_records, unpack_rows

__all__ = [
    "BudgetPlan",
    "Needs",
    "NeuronStore",
    "SlotArrays",
    "SlotTable",
    "commit_records",
    "empty_slots",
    "load_store",
    "plan_budget",
    "record_layout",
    "slot_bytes",
    "unpack_records",
    "unpack_rows",
]
