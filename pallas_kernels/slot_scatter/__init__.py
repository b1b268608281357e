"""Write staged records into slots of the cache."""

from pallas_kernels.slot_scatter.api import slot_scatter

__all__ = ["slot_scatter"]
