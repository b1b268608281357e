"""Steps of a few tokens through many layers without Python in between: the attention and the neurons of each layer.

All neurons, or those that predictors choose from the residual stream after an attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Int64, UInt8

from kairox_jax.config import ModelConfig
from kairox_jax.host import rows, step_forecast_loops, step_loops, threads
from kairox_jax.host.attention import AttentionWeights
from kairox_jax.host.calls import MAX_BATCH, aligned, check_floats, check_places, chunk_of, read_only
from kairox_jax.host.crew import STAGE_BYTES
from kairox_jax.host.forecast import HostPredictors
from kairox_jax.host.kernels import LayerFfn
from kairox_jax.host.step_forecast_loops import NUM_COLUMNS
from kairox_jax.host.step_loops import NUM_PLACES, Sizes
from kairox_jax.io.predictors import RMS_EPS
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


class StepForecast:
    """Predictors as a step's loops take them, with what they write.

    Args:
        predictors: of all layers.
        ahead: a layer's forecast is made from the residual stream after the attention of the layer before (the
            first one's from its own); otherwise after its own.

    Raises:
        ValueError: layers whose formats differ; see ``can_run``.
    """

    def __init__(self, predictors: HostPredictors, *, ahead: bool) -> None:
        if not self.can_run(predictors):
            raise ValueError("the layers' predictors differ in formats: call them layer by layer")
        self._arrays = [  # they must live as long as their addresses are in use
            (fc1, fc1_bias, fc2, bias, rest, rest_bias)
            for fc1, _, fc1_bias, fc2, _, bias, rest, _, rest_bias, _ in predictors.layers
        ]
        table = [
            [*(array.ctypes.data for array in arrays), len(arrays[0]), arrays[2].shape[1], arrays[4].shape[1]]
            for arrays in self._arrays
        ]
        self._table = np.array(table, np.int64).reshape(len(table), NUM_COLUMNS)
        self._limits = np.array([layer[-1] for layer in predictors.layers], np.float32)
        first = predictors.layers[0]
        fc1, fc1_bias, fc2, bias, rest, _ = self._arrays[0]
        self._forms = (fc1.shape[1], first[1], first[4], first[7])
        self._biased = np.array([len(fc1_bias) > 0, len(bias) > 0], np.int64)
        self._ahead, self._normalise = ahead, predictors.normalise
        self._neurons, self._rest = len(fc2), len(rest)
        self.widest = int(self._table[:, step_forecast_loops.RANK].max())
        # Chosen neurons and what stands in for the others, of even and of odd layers.
        self._chosen = [np.zeros((2, n, self._neurons), np.bool_) for n in range(MAX_BATCH + 1)]
        self._rests = [np.zeros((2, n, self._rest), np.float32) for n in range(MAX_BATCH + 1)]
        self._ids, self._active = np.empty(self._neurons, np.int32), np.empty((1, self._neurons), np.uint8)
        self.most_chunks = max(-(-n // chunk_of(n)) for n in range(1, self._neurons + 1))

    @staticmethod
    def can_run(predictors: HostPredictors) -> bool:
        """Say whether the layers' predictors are alike but for their ranks."""
        marks = {(a, c, e, len(b) > 0, len(d) > 0, len(f) > 0)
                 for _, a, b, _, c, d, _, e, f, _ in predictors.layers}  # fmt: skip
        return len(marks) == 1

    def arguments(self, n: int, num: int, first: int, counts: Int64[np.ndarray, "l n"]) -> tuple:
        """Return what the loops take for n tokens of ``num`` floats, from layer ``first`` on."""
        return (
            self._table, self._limits, first, self._ahead, self._normalise, np.float32(RMS_EPS),
            aligned("normed", n, num), *self._forms, self._biased, aligned("hidden", n * self.widest),
            aligned("scores", n, self._neurons), self._rests[n], self._chosen[n], self._ids, counts, self._active,
        )  # fmt: skip


class _Alike:
    """Layers that follow each other and are alike: one call of the compiled loops runs them.

    Args:
        layers: of equal shapes and formats.
        activations: of the products, one of ``HOST_ACTIVATIONS``.
        forecast: chooses their neurons; None takes all.
    """

    def __init__(
        self, layers: Sequence[StepLayer], *, activations: str, forecast: StepForecast | None
    ) -> None:
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
        self._ids, self._forecast = np.arange(self._sizes.neurons, dtype=np.int32), forecast
        self._chunk = chunk_of(len(self._ids))
        chunks = -(-len(self._ids) // self._chunk) if forecast is None else forecast.most_chunks
        self._slots = np.empty(chunks, np.int64)
        stages = step_loops.STAGES if forecast is None else step_forecast_loops.STAGES
        self._counters = np.zeros((stages * len(layers) + 1) * STAGE_BYTES // 8, np.int64)

    def run(
        self,
        x: Float[np.ndarray, "n D"],
        y: Float[np.ndarray, "n D"],
        fired: UInt8[np.ndarray, "L n F"],
        stamps: Int64[np.ndarray, "ends 2"],
        *,
        first: int,
        counts: Int64[np.ndarray, "L n"],
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
        widest = max(num, heads_size, 0 if self._forecast is None else self._forecast.widest)
        with threads.own() as helpers:
            partials = aligned("partial", helpers * len(self._slots), len(width), padded_columns(num))
            inputs = aligned("inputs", rows.prepared_floats(widest, len(width)))
            begin = self.table, self._sizes, np.float32(config.norm_eps), config.parallel_block, *self._forms
            middle = (
                cos, sin, cache_rows, positions, window, x, y, aligned("h", n, num),
                aligned("qkv", n, self._sizes.qkv_rows), aligned("mixed", n, heads_size), aligned("attended", n, num),
                inputs, partials, self._slots, fired, stamps,
            )  # fmt: skip
            if self._forecast is None:
                step_loops.layers(
                    *begin, gated, mark, width, down_mark, row_bytes, rule, self._thresholds, self._ids, self._chunk,
                    *middle, self._counters, helpers,
                )  # fmt: skip
                return
            step_forecast_loops.layers(
                *begin, gated, mark, width, rows.ALONE, down_mark, row_bytes, rule, self._thresholds, *middle,
                *self._forecast.arguments(n, num, first, counts), self._counters, helpers,
            )  # fmt: skip


class HostStep:
    """Runs all layers of a model, whose neurons the host computes.

    Args:
        config: sizes of the model.
        layers: in order.
        activations: of the products with packed rows, one of ``HOST_ACTIVATIONS``.
        forecast: chooses the neurons; None takes all.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[StepLayer],
        *,
        activations: str = "float32",
        forecast: StepForecast | None = None,
    ) -> None:
        self._config = config
        groups = [list(group) for _, group in groupby(layers, key=_form)]
        self._groups = [_Alike(group, activations=activations, forecast=forecast) for group in groups]
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
    ) -> tuple[Float[np.ndarray, "2 L"], Int64[np.ndarray, "L n"]]:
        """Run one new position of each of n sequences through all layers, n 1 to 8.

        To rounding the result is what ``HostAttention.front`` and ``LayerFfn`` give layer by layer. Its bits do not
        depend on the number of threads.

        Args:
            x: residual stream, updated in place; the last layer's FFN is not added yet.
            y: overwritten with that.
            fired: overwritten: which neurons were active, 1 or 0.
            cache_rows, positions, cos, sin: as for ``HostAttention.front``.

        Returns:
            The times of each layer's attention (and forecast) and of its FFN, in ms; neurons that were computed.

        Raises:
            ValueError: shapes or types do not fit. Rows and positions outside the cache are not looked for.
        """
        n, neurons, num_layers = (
            len(x),
            self._config.num_neurons,
            sum(len(group.table) for group in self._groups),
        )
        if not 1 <= n <= MAX_BATCH:
            raise ValueError(f"x holds {n} tokens: expected 1 to {MAX_BATCH}; split larger batches")
        for name, array in (("x", x), ("y", y)):
            check_floats(name, array, (n, self._config.d_model), written=True)
        check_places(n, cos, sin, cache_rows, positions)
        if fired.dtype != np.uint8 or fired.shape != (num_layers, n, neurons) or not fired.flags.c_contiguous:
            raise ValueError(
                f"fired is {fired.dtype} {fired.shape}: expected uint8 {(num_layers, n, neurons)}"
            )
        y[:] = 0
        times, done, counts = [], 0, np.full((num_layers, n), neurons, np.int64)
        for group, stamps in zip(self._groups, self._stamps, strict=True):
            mine = slice(done, done + len(group.table))
            group.run(
                x, y, fired[mine], stamps, first=done, counts=counts[mine], config=self._config, cos=cos, sin=sin,
                cache_rows=cache_rows, positions=positions,
            )  # fmt: skip
            if group.last_added is not None:
                y += group.last_added
            done = mine.stop
            passed = np.diff(stamps.reshape(-1)[:-1])
            times.append(passed.reshape(-1, 2).T * 1e-6)
        return np.concatenate(times, axis=1), counts


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
