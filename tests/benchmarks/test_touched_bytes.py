"""The bytes a token reads, against counts by hand and a count read by read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.touched_bytes import TouchedBytes, cache_bytes, neuron_bytes, seen_positions


def test_neuron_bytes_by_hand():
    # 100 neurons, 40 active, gate and up rows of 10 bytes, down of 36: 100 * 20 + 40 * 36.
    assert neuron_bytes(100, 40, (10, 10, 36), always=2) == 3440
    assert neuron_bytes(100, 40, (10, 10, 36), always=1) == 100 * 10 + 40 * 46
    assert neuron_bytes(0, 0, (10, 10, 36), always=2) == 0


@given(active=st.lists(st.booleans(), max_size=40), always=st.integers(0, 3))
def test_neuron_bytes_is_the_sum_over_single_reads(active, always):
    rows, total = (7, 11, 13), 0
    for is_active in active:
        for number, size in enumerate(rows):
            if number < always or is_active:
                total += size
    assert neuron_bytes(len(active), sum(active), rows, always=always) == total


@pytest.mark.parametrize(("evaluated", "active", "always"), [(3, 4, 2), (3, -1, 2), (3, 1, 4), (3, 1, -1)])
def test_counts_that_cannot_be_right_are_refused(evaluated, active, always):
    with pytest.raises(ValueError, match="expected"):
        neuron_bytes(evaluated, active, (1, 1, 1), always=always)


def test_cache_bytes_of_a_short_decode():
    # A prompt of 5: the first step writes position 5 and so sees 6 positions.
    assert seen_positions(5, 3) == [6, 7, 8]
    assert cache_bytes(seen_positions(5, 3), 100) == 700


def test_the_total_is_the_sum_of_the_written_parts():
    touched = TouchedBytes(other_weights=0.6, host_neurons=1.6, device_neurons=2.6, kv_cache=4.0)
    assert touched.total == pytest.approx(8.8)
    written = touched.to_json()
    assert written.pop("total") == sum(written.values()) == 10
