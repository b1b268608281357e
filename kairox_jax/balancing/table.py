"""The table of policies by name. A new policy is one file and one line here."""

from __future__ import annotations

import inspect
from typing import Any

from kairox_jax.balancing.contract import Policy
from kairox_jax.balancing.current import Current, CurrentFreq
from kairox_jax.balancing.dynamic import Dynamic
from kairox_jax.balancing.eager import Eager
from kairox_jax.balancing.guide import Guide
from kairox_jax.balancing.layers import Layers
from kairox_jax.balancing.lfu import LFU
from kairox_jax.balancing.lru import LRU
from kairox_jax.balancing.oracle import Oracle
from kairox_jax.balancing.paper import Paper
from kairox_jax.balancing.paper_artifact import PaperArtifact
from kairox_jax.balancing.split import Split
from kairox_jax.balancing.static import Static
from kairox_jax.balancing.topk import EagerLambda0, TopK

POLICIES: dict[str, type] = {
    "current": Current,
    "current-freq": CurrentFreq,
    "dynamic": Dynamic,
    "eager": Eager,
    "eager-lambda0": EagerLambda0,
    "guide": Guide,
    "layers": Layers,
    "lfu": LFU,
    "lru": LRU,
    "oracle": Oracle,
    "paper": Paper,
    "paper-artifact": PaperArtifact,
    "split": Split,
    "static": Static,
    "topk": TopK,
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
