"""Initial residents and the sharing of slots."""

import numpy as np
import pytest

from kairox_jax.balancing import Guide, Shape, Static, hottest, initial_residents, share_slots

PRIOR = np.array([[0.1, 0.9, 0.5, 0.5], [0.4, 0.3, 0.2, 0.1]])


def test_hottest_takes_each_layers_slots_and_ties_by_index() -> None:
    resident = hottest(Shape(2, 4, np.array([2, 1])), PRIOR)
    assert [np.flatnonzero(row).tolist() for row in resident] == [[1, 2], [0]]


def test_without_a_prior_the_first_neurons_are_taken() -> None:
    assert hottest(Shape(1, 4, 2), None).tolist() == [[True, True, False, False]]


def test_guide_starts_empty_unless_told_otherwise() -> None:
    shape = Shape(2, 4, 2)
    assert not initial_residents(Guide(), shape, PRIOR).any()
    np.testing.assert_array_equal(
        initial_residents(Guide(warm_start=True), shape, PRIOR), hottest(shape, PRIOR)
    )
    np.testing.assert_array_equal(initial_residents(Static(), shape, PRIOR), hottest(shape, PRIOR))


def test_prior_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="prior is"):
        initial_residents(Static(), Shape(2, 5, 2), PRIOR)


def test_slots_are_shared_equally_to_the_last_one() -> None:
    assert share_slots(Static(), 5, 3, 4, None).capacity.tolist() == [2, 2, 1]
    with pytest.raises(ValueError, match="13 slots"):
        share_slots(Static(), 13, 3, 4, None)
