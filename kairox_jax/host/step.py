"""Steps of a few tokens through many layers without Python in between: attention and all neurons of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Int64, UInt8

from kairox_jax.config import ModelConfig
from kairox_jax.host import rows, step_loops, threads
from kairox_jax.host.attention import AttentionWeights
from kairox_jax.host.calls import aligned, check_floats, chunk_of, read_only
from kairox_jax.host.crew import STAGE_BYTES
from kairox_jax.host.kernels import LayerFfn
from kairox_jax.host.step_loops import NUM_PLACES, STAGES, Sizes
from kairox_jax.quant.columns import padded_columns


@dataclass(frozen=True, kw_only=True)
class StepLayer:
    """A layer as a step sees it.

    Attributes:
        attention: its weights.
        keys, values: its cache, float32 [B, K, S, H].
        ffn: its neurons.
        added: float32 [D], what the FFN adds besides its neurons; None for nothing.
    """

    attention: AttentionWeights
    keys: Float[np.ndarray, "B K S H"]
    values: Float[np.ndarray, "B K S H"]
    ffn: LayerFfn
    added: Float[np.ndarray, " D"] | None


class _Alike:
    """Layers that follow each other and are alike: one call of the compiled loops runs them.

    Args:
        layers: of equal shapes and formats.
        activations: of the products, one of ``HOST_ACTIVATIONS``.
    """

    def __init__(self, layers: Sequence[StepLayer], *, activations: str) -> None:
        none = np.empty(0, np.float32)
        nothing = none if layers[0].added is None else np.zeros_like(layers[0].added)
        added = [nothing, *(none if layer.added is None else layer.added for layer in layers)]
        # In the order of the table's columns. They must live as long as their addresses are in use.
        self._arrays = [
            _arrays(layer, np.ascontiguousarray(before)) for layer, before in zip(layers, added, strict=False)
        ]
        table = [[array.ctypes.data for array in arrays] for arrays in self._arrays]
        self.table = np.array(table, np.int64).reshape(len(layers), NUM_PLACES)
        self.last_added = layers[-1].added
        first = layers[0]
        self._sizes = _sizes(first)
        _, *ffn = first.ffn.rows
        rule = np.int64(first.ffn.rule[0])
        self._forms = [rows.mark_of(matrix.format, activations) for matrix in _matrices(first)]
        self._ffn = (*ffn, *first.ffn.down[:2], rule)
        self._thresholds = np.array([layer.ffn.rule[1] for layer in layers], np.float32)
        self._ids = np.arange(self._sizes.neurons, dtype=np.int32)
        self._chunk = chunk_of(len(self._ids))
        self._slots = np.empty(-(-len(self._ids) // self._chunk), np.int64)
        self._counters = np.zeros((STAGES * len(layers) + 1) * STAGE_BYTES // 8, np.int64)

    def run(
        self,
        x: Float[np.ndarray, "n D"],
        y: Float[np.ndarray, "n D"],
        fired: UInt8[np.ndarray, "L n F"],
        stamps: Int64[np.ndarray, "ends 2"],
        *,
        config: ModelConfig,
        cos: Float[np.ndarray, "n half"],
        sin: Float[np.ndarray, "n half"],
        cache_rows: Int[np.ndarray, " n"],
        positions: Int[np.ndarray, " n"],
    ) -> None:
        """Run the layers; ``y`` comes in as the last one's FFN output before them, and goes out as theirs."""
        n, num = x.shape
        width, heads_size = rows.width_of(n), config.num_heads * config.head_dim
        gated, mark, down_mark, row_bytes, rule = self._ffn
        window = self._sizes.positions if config.sliding_window is None else config.sliding_window
        with threads.own() as helpers:
            partials = aligned("partial", helpers * len(self._slots), len(width), padded_columns(num))
            step_loops.layers(
                self.table, self._sizes, np.float32(config.norm_eps), config.parallel_block, *self._forms, gated, mark,
                width, down_mark, row_bytes, rule, self._thresholds, self._ids, self._chunk, cos, sin, cache_rows,
                positions, window, x, y, aligned("h", n, num), aligned("qkv", n, self._sizes.qkv_rows),
                aligned("mixed", n, heads_size), aligned("attended", n, num),
                aligned("inputs", rows.prepared_floats(max(num, heads_size), len(width))), partials, self._slots, fired,
                stamps, self._counters, helpers,
            )  # fmt: skip


class HostStep:
    """Runs all layers of a model, every neuron of which the host computes.

    Args:
        config: sizes of the model.
        layers: in order.
        activations: of the products with packed rows, one of ``HOST_ACTIVATIONS``.
    """

    def __init__(self, config: ModelConfig, layers: Sequence[StepLayer], *, activations: str = "float32") -> None:
        self._config = config
        groups = [list(group) for _, group in groupby(layers, key=_form)]
        self._groups = [_Alike(group, activations=activations) for group in groups]
        self._stamps = [np.zeros((len(group) + 1, 2), np.int64) for group in groups]

    def __call__(
        self,
        x: Float[np.ndarray, "n D"],
        y: Float[np.ndarray, "n D"],
        fired: UInt8[np.ndarray, "L n F"],
        *,
        cache_rows: Int[np.ndarray, " n"],
        positions: Int[np.ndarray, " n"],
        cos: Float[np.ndarray, "n half"],
        sin: Float[np.ndarray, "n half"],
    ) -> Float[np.ndarray, "2 L"]:
        """Run one new position of each of n sequences through all layers, n 1 to 8.

        To rounding the result is what ``HostAttention.front`` and ``LayerFfn`` give layer by layer. Its bits do not
        depend on the number of threads.

        Args:
            x: residual stream, updated in place; the last layer's FFN is not added yet.
            y: overwritten with that.
            fired: overwritten: which neurons were active, 1 or 0.
            cache_rows, positions, cos, sin: as for ``HostAttention.front``.

        Returns:
            The times of each layer's attention and of its FFN, in ms.

        Raises:
            ValueError: shapes or types do not fit. Rows and positions outside the cache are not looked for.
        """
        n, neurons, num_layers = len(x), self._config.num_neurons, sum(len(group.table) for group in self._groups)
        for name, array in (("x", x), ("y", y)):
            check_floats(name, array, (n, self._config.d_model), written=True)
        for name, turn in (("cos", cos), ("sin", sin)):
            check_floats(name, turn, (n, None))
        for name, numbers in (("cache_rows", cache_rows), ("positions", positions)):
            if numbers.dtype != np.int32 or numbers.shape != (n,):
                raise ValueError(f"{name} are {numbers.dtype} {numbers.shape}: expected int32 ({n},)")
        if fired.dtype != np.uint8 or fired.shape != (num_layers, n, neurons) or not fired.flags.c_contiguous:
            raise ValueError(
                f"fired is {fired.dtype} {fired.shape}: expected uint8 {(num_layers, n, neurons)}"
            )
        y[:] = 0
        times, done = [], 0
        for group, stamps in zip(self._groups, self._stamps, strict=True):
            group.run(
                x, y, fired[done : done + len(group.table)], stamps, config=self._config, cos=cos, sin=sin,
                cache_rows=cache_rows, positions=positions,
            )  # fmt: skip
            if group.last_added is not None:
                y += group.last_added
            done += len(group.table)
            passed = np.diff(stamps.reshape(-1)[:-1])
            times.append(passed.reshape(-1, 2).T * 1e-6)
        return np.concatenate(times, axis=1)


def _matrices(layer: StepLayer) -> tuple[Any, Any]:
    return layer.attention.wqkv, layer.attention.wo


def _arrays(layer: StepLayer, before: np.ndarray) -> list[np.ndarray]:
    """List what the table points at, in its columns' order."""
    part = layer.attention
    records, *_ = layer.ffn.rows
    _, _, biases, scales, minima = layer.ffn.down
    return [
        part.norm, part.norm_bias, part.wqkv.data, part.bqkv, layer.keys, layer.values, part.wo.data, part.bo,
        part.ffn_norm, part.ffn_norm_bias, records, biases, scales, minima, read_only(before),
    ]  # fmt: skip


def _sizes(layer: StepLayer) -> Sizes:
    part = layer.attention
    records, *_ = layer.ffn.rows
    _, _, biases, scales, minima = layer.ffn.down
    cache_rows, kv_heads, positions, head_dim = layer.keys.shape
    return Sizes(
        norm_bias=part.norm_bias.size,
        bqkv=part.bqkv.size,
        bo=part.bo.size,
        added=0 if layer.added is None else layer.added.size,
        qkv_rows=part.wqkv.data.shape[0],
        qkv_bytes=part.wqkv.data.shape[1],
        out_rows=part.wo.data.shape[0],
        out_bytes=part.wo.data.shape[1],
        cache_rows=cache_rows,
        kv_heads=kv_heads,
        positions=positions,
        head_dim=head_dim,
        neurons=records.shape[0],
        record_bytes=records.shape[1],
        biased=biases.shape[0],
        biases=biases.shape[1],
        scales=scales.shape[0],
        minima=minima.shape[0],
        columns=scales.shape[1],
    )


def _form(layer: StepLayer) -> tuple:
    """Return what layers of one call have in common."""
    records, *ffn = layer.ffn.rows
    return (
        _sizes(layer),
        *(matrix.format for matrix in _matrices(layer)),
        *ffn,
        *layer.ffn.down[:2],
        layer.ffn.rule[0],
    )
