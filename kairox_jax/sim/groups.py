"""Traces and priors in the order of a grouping, so that a group's neurons are neighbours."""

from __future__ import annotations

import numpy as np

from kairox_jax.io.grouping import Grouping
from kairox_jax.io.trace import Trace


def reorder(trace: Trace, grouping: Grouping) -> Trace:
    """Return the trace with each layer's neurons in the grouping's order.

    Raises:
        ValueError: the grouping is of a model of another shape, or names another model.
    """
    want, got = grouping.permutation.shape, (trace.num_layers, trace.num_neurons)
    if want != got:
        raise ValueError(
            f"the grouping has {want[0]} layers of {want[1]} neurons, trace {trace.name} {got[0]} of {got[1]}: "
            "make a grouping for this model with `kairox group`"
        )
    ours, theirs = grouping.meta.get("fingerprint"), trace.meta.get("fingerprint")
    if None not in (ours, theirs) and ours != theirs:
        raise ValueError(
            f"the grouping was made for {grouping.meta.get('model')}, trace {trace.name} is of "
            f"{trace.meta.get('model')}: make a grouping for this model with `kairox group`"
        )
    packed = np.empty_like(trace.packed)
    for layer, order in enumerate(grouping.permutation):
        rows = np.unpackbits(trace.packed[:, layer], axis=-1, count=trace.num_neurons)
        packed[:, layer] = np.packbits(rows[:, order], axis=-1)
    return Trace(packed, trace.num_neurons, trace.token_ids, trace.meta, trace.name)


def reorder_prior(prior: np.ndarray | None, grouping: Grouping) -> np.ndarray | None:
    """Return frequencies [L, F] in the grouping's order."""
    return None if prior is None else np.take_along_axis(prior, grouping.permutation, axis=1)
