"""The slot table: which neuron holds which device slot."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int

NONE = -1


class SlotTable:
    """Who holds which slot of each layer.

    A slot is free, reserved (its record is on the way) or held (its neuron is resident). A neuron is resident only
    from the moment its record has been committed to the device.

    Args:
        num_layers: L.
        num_neurons: F.
        capacity: slots of each layer, int [L].

    Raises:
        ValueError: a capacity below zero or above F.
    """

    def __init__(self, num_layers: int, num_neurons: int, capacity: Int[np.ndarray, " L"]) -> None:
        capacity = np.broadcast_to(np.asarray(capacity, np.int32), (num_layers,))
        if capacity.min() < 0 or capacity.max() > num_neurons:
            raise ValueError(
                f"slots per layer {capacity.tolist()} must lie between 0 and {num_neurons} neurons"
            )
        self.capacity = capacity
        self.slot_of = np.full((num_layers, num_neurons), NONE, np.int32)
        self.reserved = np.zeros((num_layers, num_neurons), bool)
        self.neuron_of = [np.full(c, NONE, np.int32) for c in capacity]
        self._free = [list(range(c - 1, -1, -1)) for c in capacity]

    def resident(self, layer: int) -> Bool[np.ndarray, " F"]:
        """Return which neurons the device can compute now, bool [F]."""
        return (self.slot_of[layer] != NONE) & ~self.reserved[layer]

    def held(self, layer: int) -> Bool[np.ndarray, " F"]:
        """Return which neurons have a slot, be they resident or on the way, bool [F]."""
        return self.slot_of[layer] != NONE

    def occupied(self, layer: int) -> Bool[np.ndarray, " C"]:
        """Return which slots hold a committed record, bool [C]."""
        neurons = self.neuron_of[layer]
        return (neurons != NONE) & ~self.reserved[layer][neurons]

    def free(self, layer: int) -> int:
        """Return the number of free slots."""
        return len(self._free[layer])

    def evict(self, layer: int, neurons: Int[np.ndarray, " n"]) -> None:
        """Free the slots of neurons that are resident or on the way.

        Raises:
            ValueError: a neuron has no slot.
        """
        slots = self.slot_of[layer, neurons]
        if (slots == NONE).any() or len(np.unique(neurons)) != len(neurons):
            raise ValueError(f"layer {layer}: evicting a neuron twice, or one that has no slot")
        self.slot_of[layer, neurons] = NONE
        self.reserved[layer, neurons] = False
        self.neuron_of[layer][slots] = NONE
        self._free[layer].extend(slots.tolist())

    def reserve(self, layer: int, neurons: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Take free slots for neurons whose records are on the way.

        Returns:
            The slots, int32 [n].

        Raises:
            ValueError: too few free slots, or a neuron that has a slot already.
        """
        if (self.slot_of[layer, neurons] != NONE).any() or len(np.unique(neurons)) != len(neurons):
            raise ValueError(f"layer {layer}: promoting a neuron that already has a slot")
        if len(neurons) > self.free(layer):
            raise ValueError(f"layer {layer}: {len(neurons)} promotions, but {self.free(layer)} free slots")
        slots = np.array([self._free[layer].pop() for _ in neurons], np.int32)
        self.slot_of[layer, neurons] = slots
        self.neuron_of[layer][slots] = neurons
        self.reserved[layer, neurons] = True
        return slots

    def commit(
        self, layer: int, neurons: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"]
    ) -> Bool[np.ndarray, " n"]:
        """Make reserved neurons resident: their records are on the device.

        Args:
            layer: index of the layer.
            neurons: whose records arrived.
            slots: what ``reserve`` gave for them.

        Returns:
            Which of them still hold that slot, bool [n]; the others were evicted on the way.
        """
        kept = self.slot_of[layer, neurons] == slots
        self.reserved[layer, neurons[kept]] = False
        return kept
