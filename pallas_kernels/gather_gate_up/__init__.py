"""Values of the listed slots: gate and up products, activation rule, sparsity."""

from pallas_kernels.gather_gate_up.api import gather_gate_up

__all__ = ["gather_gate_up"]
