"""The slot table in any order of moves, against a model in plain dictionaries; the scatter of records."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kairox_jax.placement import SlotTable

LAYERS, NEURONS = 2, 9
CAPACITY = np.array([4, 6], np.int32)
layers = st.integers(0, LAYERS - 1)
some_neurons = st.lists(st.integers(0, NEURONS - 1), max_size=5)


def ids(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


class SlotMachine(RuleBasedStateMachine):
    """Keeps, in dictionaries, which neuron has which slot, whether it arrived, and what is on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(LAYERS, NEURONS, CAPACITY)
        self.slot: list[dict[int, int]] = [{} for _ in range(LAYERS)]
        self.arrived: list[set[int]] = [set() for _ in range(LAYERS)]
        self.on_the_way: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(LAYERS)]

    @rule(layer=layers, neurons=some_neurons)
    def reserve(self, layer: int, neurons: list[int]) -> None:
        held, free = self.slot[layer], CAPACITY[layer] - len(self.slot[layer])
        twice = len(set(neurons)) != len(neurons) or any(n in held for n in neurons)
        if twice or len(neurons) > free:
            with pytest.raises(ValueError, match="already has a slot" if twice else "free slots"):
                self.table.reserve(layer, ids(neurons))
            return
        slots = self.table.reserve(layer, ids(neurons))
        assert slots.shape == (len(neurons),) and slots.dtype == np.int32
        assert len(set(slots.tolist())) == len(neurons)
        assert not set(slots.tolist()) & set(held.values()), "a slot that another neuron owns"
        assert all(0 <= s < CAPACITY[layer] for s in slots)
        held.update(zip(neurons, slots.tolist(), strict=True))
        self.on_the_way[layer].append((ids(neurons), slots))

    @rule(layer=layers, neurons=some_neurons)
    def evict(self, layer: int, neurons: list[int]) -> None:
        neurons = list(dict.fromkeys(neurons))
        if any(n not in self.slot[layer] for n in neurons):
            with pytest.raises(ValueError, match="has no slot"):
                self.table.evict(layer, ids(neurons))
            return
        self.table.evict(layer, ids(neurons))
        for neuron in neurons:
            del self.slot[layer][neuron]
            self.arrived[layer].discard(neuron)

    @precondition(lambda self: any(self.slot))
    @rule(data=st.data())
    def evict_one_that_is_held(self, data: st.DataObject) -> None:
        layer = data.draw(st.sampled_from([i for i, held in enumerate(self.slot) if held]))
        self.evict(layer, [data.draw(st.sampled_from(sorted(self.slot[layer])))])

    @precondition(lambda self: any(self.on_the_way))
    @rule(data=st.data())
    def commit_the_oldest(self, data: st.DataObject) -> None:
        layer = data.draw(st.sampled_from([i for i, sent in enumerate(self.on_the_way) if sent]))
        neurons, slots = self.on_the_way[layer].pop(0)
        kept = self.table.commit(layer, neurons, slots)
        pairs = list(zip(neurons.tolist(), slots.tolist(), strict=True))
        assert kept.tolist() == [self.slot[layer].get(n) == s for n, s in pairs]
        self.arrived[layer] |= {n for n, s in pairs if self.slot[layer].get(n) == s}

    @invariant()
    def table_says_the_same(self) -> None:
        for layer, held in enumerate(self.slot):
            table = self.table
            assert np.flatnonzero(table.held(layer)).tolist() == sorted(held)
            assert np.flatnonzero(table.resident(layer)).tolist() == sorted(self.arrived[layer])
            assert table.free(layer) == CAPACITY[layer] - len(held)
            slots = sorted(held[n] for n in self.arrived[layer])
            assert np.flatnonzero(table.occupied(layer)).tolist() == slots
            for neuron, slot in held.items():
                assert table.neuron_of[layer][slot] == neuron and table.slot_of[layer, neuron] == slot


SlotMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlotMachine = SlotMachine.TestCase


def test_evicting_a_neuron_twice_in_one_call_is_refused_or_frees_one_slot() -> None:
    table = SlotTable(1, 8, np.array([2]))
    table.reserve(0, ids([3, 5]))
    try:
        table.evict(0, ids([3, 3]))
    except ValueError:
        assert table.free(0) == 0
        return
    assert table.free(0) == 1, "the slot is in the free list twice, so two neurons can own it"


def test_evicted_on_the_way_and_promoted_again_is_resident_after_either_arrival() -> None:
    table = SlotTable(1, 8, np.array([1]))
    first = table.reserve(0, ids([3]))
    table.evict(0, ids([3]))
    second = table.reserve(0, ids([3]))
    assert not table.resident(0).any() and not table.occupied(0).any()
    table.commit(0, ids([3]), first)  # the same record in the same slot
    table.commit(0, ids([3]), second)
    assert np.flatnonzero(table.resident(0)).tolist() == [3]


def test_a_late_arrival_does_not_make_another_owner_of_its_slot_resident() -> None:
    table = SlotTable(1, 8, np.array([1]))
    first = table.reserve(0, ids([3]))
    table.evict(0, ids([3]))
    table.reserve(0, ids([6]))
    assert table.commit(0, ids([3]), first).tolist() == [False]
    assert not table.resident(0).any() and table.held(0)[6]


def test_one_layer_does_not_touch_another() -> None:
    table = SlotTable(2, 8, np.array([2, 2]))
    table.commit(0, ids([1, 2]), table.reserve(0, ids([1, 2])))
    assert table.free(1) == 2 and not table.held(1).any()
    table.reserve(1, ids([1]))
    table.evict(0, ids([1]))
    assert table.held(1)[1]


@pytest.mark.parametrize("capacity", [[-1, 2], [9, 2]])
def test_impossible_capacity_is_refused(capacity: list[int]) -> None:
    with pytest.raises(ValueError, match="between 0 and 8 neurons"):
        SlotTable(2, 8, np.array(capacity))


def test_no_slots_at_all() -> None:
    table = SlotTable(1, 8, np.array([0]))
    assert table.free(0) == 0 and table.occupied(0).shape == (0,) and not table.held(0).any()
    with pytest.raises(ValueError, match="1 promotions, but 0 free slots"):
        table.reserve(0, ids([0]))
