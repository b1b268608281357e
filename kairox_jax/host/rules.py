"""The rules that say when a neuron is active and what it contributes; shared by kernels and reference."""

from __future__ import annotations

from enum import IntEnum

GATED_ONLY = ("drelu",)


class Rule(IntEnum):
    """Activation of an FFN, as a code for compiled kernels.

    With gate g, up u, and threshold t; an ungated FFN has z = f(u) by the same rule.

    SILU: z = silu(g) u, active where |z| > t. RELU: z = g u, active where g > 0.
    RELU2: z = g^2 u, active where g > 0. FATRELU: z = g u, active where g > t.
    DRELU: z = g u, active where g > 0 and u > 0.
    """

    SILU = 0
    RELU = 1
    RELU2 = 2
    FATRELU = 3
    DRELU = 4

    @classmethod
    def of(cls, activation: str) -> Rule:
        """Return the rule of an activation's name.

        Raises:
            ValueError: unknown name.
        """
        try:
            return cls[activation.upper()]
        except KeyError:
            names = ", ".join(rule.name.lower() for rule in cls)
            raise ValueError(f"activation {activation!r} is not one of {names}") from None
