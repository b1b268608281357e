"""Weighted sum of the down rows of the listed slots."""

from pallas_kernels.gather_down.api import gather_down

__all__ = ["gather_down"]
