"""The static policy moves nothing."""

import numpy as np

from kairox_jax.balancing import Costs, Shape, Static, Times


def test_nothing_moves() -> None:
    policy, shape = Static(), Shape(1, 4, 2)
    state = policy.feedback(policy.init(shape, None), None, Times(1.0, 1.0, 9.0))
    _, plan = policy.plan(state, 0, np.ones(4, bool), np.zeros(4, bool), Costs(max_moves=9, free_slots=2))
    assert plan.load.size == plan.evict.size == 0
