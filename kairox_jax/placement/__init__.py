"""Where neurons live: the host's store, the device's slots, and the plan of a memory budget."""

from kairox_jax.placement.planner import BudgetPlan, Needs, plan_budget
from kairox_jax.placement.slots import SlotArrays, SlotTable, commit_records, empty_slots
from kairox_jax.placement.store import NeuronStore, aligned_empty, load_store, record_shape

__all__ = [
    "BudgetPlan",
    "Needs",
    "NeuronStore",
    "SlotArrays",
    "SlotTable",
    "aligned_empty",
    "commit_records",
    "empty_slots",
    "load_store",
    "plan_budget",
    "record_shape",
]
