"""Where records live before the first step, and how slots are shared out among layers.

Engine and simulator both start from here; a policy may bring its own rule.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool

from kairox_jax.balancing.contract import Policy, Prior, Shape


def hottest(shape: Shape, prior: Prior | None) -> Bool[np.ndarray, "L F"]:
    """Return each layer's most frequent neurons, as many as it has slots; ties go to the lower index.

    Args:
        shape: sizes and slots.
        prior: activation frequencies [L, F]; None counts every neuron as equally frequent.
    """
    resident = np.zeros((shape.num_layers, shape.num_neurons), bool)
    for layer, slots in enumerate(shape.capacity):
        order = np.arange(shape.num_neurons) if prior is None else np.argsort(-prior[layer], kind="stable")
        resident[layer, order[:slots]] = True
    return resident


def initial_residents(policy: Policy, shape: Shape, prior: Prior | None) -> Bool[np.ndarray, "L F"]:
    """Return which neurons hold a slot before the first step.

    A policy with a method ``initial(shape, prior)`` decides; else its attribute ``warm_start`` says whether
    the hottest by ``prior`` are loaded (the default) or the slots start empty.

    Raises:
        ValueError: ``prior`` does not fit ``shape``.
    """
    if prior is not None and prior.shape != (shape.num_layers, shape.num_neurons):
        raise ValueError(
            f"prior is {list(prior.shape)}: expected [{shape.num_layers}, {shape.num_neurons}] frequencies, "
            "made from the same model"
        )
    own_rule = getattr(policy, "initial", None)
    if own_rule is not None:
        return own_rule(shape, prior)
    if getattr(policy, "warm_start", True):
        return hottest(shape, prior)
    return np.zeros((shape.num_layers, shape.num_neurons), bool)


def share_slots(
    policy: Policy, total_slots: int, num_layers: int, num_neurons: int, prior: Prior | None
) -> Shape:
    """Share ``total_slots`` out among the layers: by the policy's method ``share``, else equally.

    Raises:
        ValueError: more slots than neurons, or a negative number.
    """
    if not 0 <= total_slots <= num_layers * num_neurons:
        raise ValueError(
            f"{total_slots} slots: must lie in 0..{num_layers * num_neurons}, the neurons of all layers"
        )
    own_rule = getattr(policy, "share", None)
    if own_rule is not None:
        return Shape(num_layers, num_neurons, own_rule(total_slots, num_layers, num_neurons, prior))
    base, extra = divmod(total_slots, num_layers)
    return Shape(num_layers, num_neurons, base + (np.arange(num_layers) < extra))
