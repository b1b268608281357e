"""The table of policies by name. A new policy is one file and one line here."""

from __future__ import annotations

import inspect
from typing import Any

from kairox_jax.balancing.contract import Policy
from kairox_jax.balancing.guide import Guide
from kairox_jax.balancing.static import Static

POLICIES: dict[str, type] = {
    "guide": Guide,
    "static": Static,
}


def make_policy(name: str, **params: Any) -> Policy:
    """Return the policy of that name, made with ``params``.

    Raises:
        ValueError: no such policy, or it has no such parameter.
    """
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is unknown: choose one of {', '.join(sorted(POLICIES))}")
    known = [p for p in inspect.signature(POLICIES[name]).parameters if p not in ("args", "kwargs")]
    for key in params:
        if key not in known:
            raise ValueError(f"policy {name!r} has no parameter {key!r}: it has {', '.join(known) or 'none'}")
    return POLICIES[name](**params)
