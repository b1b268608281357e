"""What a touched neuron costs while all layers are trained together: a price for each kind of text, and its control."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

LATELY = 0.2  # weight of a step in the share that was touched lately
START_PRICE = 0.8  # nats for all neurons instead of none; about what the loss pays near half
PRICE_RATE = 0.2  # by which the price moves each step, times the share that is too large
STIFFNESS = 30.0  # what is added to the price, times the share that is too large: it damps the price's swings


class Price:
    """The price of a touched neuron for each kind of text, moved until the kind touches the wanted share.

    Attributes:
        kinds: names of the K kinds.
        wanted: the share that each kind may touch, [K].
        values: price and lately touched share of each kind, [2, K].
    """

    def __init__(self, wanted: dict[str, float], touched: dict[str, float]) -> None:
        """Begin with one price, from the share that each kind touches and the one that it may touch."""
        self.kinds, self.wanted = list(wanted), np.array([*wanted.values()])
        self.values = np.array([[START_PRICE] * len(wanted), [touched.get(k, wanted[k]) for k in wanted]])

    def of(self, kinds: list[str]) -> Float[np.ndarray, " B"]:
        """Return the price of each window; below zero where less than the wanted share is touched."""
        paid = self.values[0] + STIFFNESS * (self.values[1] - self.wanted)
        return np.array([paid[self.kinds.index(kind)] for kind in kinds])

    def move(self, kinds: list[str], shares: Float[np.ndarray, " B"]) -> None:
        """Take note of the shares that the windows of a step touched."""
        self.values = self.values.copy()
        for kind, share in zip(kinds, shares, strict=True):
            at = self.kinds.index(kind)
            self.values[0, at] += PRICE_RATE * (share - self.wanted[at])
            self.values[1, at] += LATELY * (share - self.values[1, at])
