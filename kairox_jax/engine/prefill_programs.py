"""The compiled program of the prefill on a device: a layer over many tokens."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jaxtyping import Array

from kairox_jax.config import ModelConfig
from kairox_jax.engine.programs import Leaves, Rebuild, attend_rows, ffn_input
from kairox_jax.models import KVCache, Norm, neuron_values
from kairox_jax.placement import unpack_records
from kairox_jax.quant import RecordLayout, SharedScales


def prefill_program(rebuild: Rebuild, config: ModelConfig) -> Callable[..., tuple[Array, KVCache]]:
    """Compile a layer over many tokens with the FFN read from its neuron records.

    ``(leaves, ffn_norm, records [F,bytes], scales, biases, threshold [], x [n,T,D], start [n], rows, cache, attend,
    layout) -> x, cache``: ``scales`` is the layer's table of shared scales or None, ``biases`` are up [F] and down
    [D] or None, ``rows`` is as for ``front_program``. Every neuron is computed and the inactive ones are dropped:
    the same function as ``exact``. The records are an argument, so that they are streamed to a device that cannot
    hold them, one layer ahead of the computation.
    """

    def run(
        leaves: Leaves,
        ffn_norm: Norm[Array],
        records: Array,
        scales: SharedScales | None,
        biases: tuple[Array, Array] | None,
        threshold: Array,
        x: Array,
        start: Array,
        rows: Array | None,
        cache: KVCache,
        attend: int,
        layout: RecordLayout,
    ) -> tuple[Array, KVCache]:
        y, cache = attend_rows(rebuild(leaves), x, start, rows, cache, attend)
        attended = x + y
        h = ffn_input(config, ffn_norm, x, attended)
        up_bias, down_bias = biases or (None, None)
        if down_bias is not None:
            attended = attended + down_bias[None, None, :]
        *gate, up, down = unpack_records(records, layout, scales)
        gate_product, up_product = h @ gate[0].T if gate else None, h @ up.T
        if up_bias is not None:
            up_product = up_product + up_bias[None, None, :]
        z, _ = neuron_values(gate_product, up_product, config.activation, threshold)
        return attended + z @ down, cache

    return jax.jit(run, static_argnames=("attend", "layout"), donate_argnames="cache")
