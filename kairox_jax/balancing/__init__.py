"""Placement policies: which neurons hold a device slot. NumPy only: no JAX, no clock, no threads."""

from kairox_jax.balancing.contract import Costs, Plan, Policy, Shape, Times, check_plan
from kairox_jax.balancing.guide import Guide
from kairox_jax.balancing.split import Split
from kairox_jax.balancing.start import hottest, initial_residents, share_slots
from kairox_jax.balancing.static import Static
from kairox_jax.balancing.table import POLICIES, make_policy

__all__ = [
    "POLICIES",
    "Costs",
    "Guide",
    "Plan",
    "Policy",
    "Shape",
    "Split",
    "Static",
    "Times",
    "check_plan",
    "hottest",
    "initial_residents",
    "make_policy",
    "share_slots",
]
