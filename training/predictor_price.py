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
        values: price and lately touched share of each kind, [2, K].
    """

    def __init__(self, kinds: list[str], share: float, values: np.ndarray) -> None:
        self.kinds, self.share, self.values = kinds, share, values

    @classmethod
    def start(cls, kinds: list[str], shares: dict[str, float], share: float) -> Price:
        """Return the first prices."""
        return cls(
            kinds, share, np.array([[START_PRICE] * len(kinds), [shares.get(k, share) for k in kinds]])
        )

    def of(self, kinds: list[str]) -> Float[np.ndarray, " B"]:
        """Return the price of each window; below zero where less than the share is touched."""
        paid = self.values[0] + STIFFNESS * (self.values[1] - self.share)
        return np.array([paid[self.kinds.index(kind)] for kind in kinds])

    def move(self, kinds: list[str], shares: Float[np.ndarray, " B"]) -> None:
        """Take note of the shares that the windows of a step touched."""
        self.values = self.values.copy()
        for kind, share in zip(kinds, shares, strict=True):
            at = self.kinds.index(kind)
            self.values[0, at] += PRICE_RATE * (share - self.share)
            self.values[1, at] += LATELY * (share - self.values[1, at])
