"""GPU kernels, one folder an operation: api, reference, implementations, cases.

Knows nothing of kairox_jax.
"""

from pallas_kernels.block_rows import (
    BlockRows,
    ColumnRows,
    Rows,
    empty_codes,
    empty_rows,
    row_format,
    split_blocks,
)
from pallas_kernels.gather_down import gather_down
from pallas_kernels.gather_gate_up import gather_gate_up
from pallas_kernels.implementations import IMPLEMENTATIONS, resolve_implementation
from pallas_kernels.rules import RULES
from pallas_kernels.slot_scatter import slot_scatter

__all__ = [
    "BlockRows",
    "ColumnRows",
    "Rows",
    "empty_codes",
    "empty_rows",
    "row_format",
    "split_blocks",
    "IMPLEMENTATIONS",
    "RULES",
    "gather_down",
    "gather_gate_up",
    "resolve_implementation",
    "slot_scatter",
]
