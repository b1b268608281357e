"""The hybrid step with one program a layer, which calls the host itself: ``host_callback`` other than "split"."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
from jaxtyping import Int

from kairox_jax.engine.dense_part import DeviceDense
from kairox_jax.engine.hybrid import Hybrid, Pass
from kairox_jax.engine.jitted_step import LayerResult, layer_program
from kairox_jax.engine.programs import attend_length, some_rows
from kairox_jax.host import Rule
from kairox_jax.host.callback import HostNeurons, host_ffn


class JittedHybrid(Hybrid):
    """A ``Hybrid`` whose layers are single programs.

    Inside one program device and host cannot be timed apart: a policy sees an equal part of the step as each layer's
    device time, and as host time the neurons outside the slots times what one took, measured alone at the start, at
    most the layer's part of the step.
    There are no forecasts: every gate is computed (``exact``).

    Args:
        store, dense: as for ``Hybrid``; the dense part must be on the device.
        host_callback: "pure", "buffer" or "ffi".
        platform: of the device.
        settings: as for ``Hybrid``.
    """

    def __init__(
        self, store: Any, dense: DeviceDense, *, host_callback: str, platform: str, **settings: Any
    ) -> None:
        thresholds, config = settings["thresholds"], settings["config"]
        self._device_dense = dense
        self._neurons = HostNeurons(store=store, rule=Rule.of(config.activation), thresholds=thresholds)
        self._host = host_ffn(self._neurons, host_callback, platform=platform)
        self._second_stream = platform in ("cuda", "gpu") and settings["implementation"] == "xla"
        self._program: Any = None
        self._padded: list[Int[np.ndarray, " F"]] = [
            np.zeros(config.num_neurons, np.int32) for _ in range(config.num_layers)
        ]
        self._host_ms_per_record = 0.0
        super().__init__(store, dense, **settings)
        self._host_ms_per_record = self._time_host()

    def _forward(
        self, ids: Int[np.ndarray, " n"], start: Int[np.ndarray, " n"], rows: Int[np.ndarray, " n"]
    ) -> Pass:
        """Run all layers and merge them into logits."""
        config, dense, num_layers = self.config, self._device_dense, self.config.num_layers
        attend = attend_length(int(start.max()) + 1, dense.length)
        chosen_rows = some_rows(rows, dense.batch)
        x: Any = dense.embed(ids[:, None], start)[:, 0]
        run = Pass(users=np.zeros((num_layers, config.num_neurons), np.uint8))
        fired: list[Any] = []
        outside: list[Int[np.ndarray, " n"]] = []
        begin = perf_counter()
        for layer in range(num_layers):
            if self.migrator.commit_arrived(layer):
                self._refresh(layer)
            result = self._run_layer(layer, x, start, chosen_rows, attend)
            x, dense.caches[layer] = result.x, result.cache
            run.masks.append(result.hits)
            fired.append(result.fired)
            outside.append(self._outside[layer])  # a later commit changes who is outside
        zero = self._zero[: len(ids)]
        run.logits = dense.logits(x, zero, zero)
        run.gpu_ms = [(perf_counter() - begin) * 1e3 / num_layers] * num_layers
        for layer, (mask, neurons) in enumerate(zip(fired, outside, strict=True)):
            run.users[layer, neurons] = np.asarray(mask)[:, : len(neurons)].sum(axis=0, dtype=np.uint8)
            run.cpu_ms.append(min(self._host_ms_per_record * len(neurons), run.gpu_ms[layer]))
            run.evaluated += len(neurons)
        return run

    def _run_layer(
        self, layer: int, x: Any, start: Int[np.ndarray, " n"], rows: Any, attend: int
    ) -> LayerResult:
        dense = self._device_dense
        if self._program is None:
            self._program = layer_program(
                dense._front, self._resident, self._host, second_stream=self._second_stream
            )
        residents = None
        if self._valid[layer].any():
            slots, scales, biases = self.migrator.slots[layer], self._scales[layer], self._slot_biases[layer]
            limit = np.float32(self.thresholds[layer])
            residents = (slots, scales, biases, self._valid[layer], None, limit)
        down_bias = None if dense.down_biases is None else dense.down_biases[layer]
        weights = (dense.attention[layer], dense.ffn_norms[layer], down_bias)
        return self._program(
            weights, x, start, rows, dense.caches[layer], residents, self._padded[layer],
            np.int32(len(self._outside[layer])), np.int32(layer), attend,
        )  # fmt: skip

    def _refresh(self, layer: int) -> None:
        super()._refresh(layer)
        # A fresh array: a program on its way may still read the one before.
        padded = np.zeros(self.config.num_neurons, np.int32)
        padded[: len(self._outside[layer])] = self._outside[layer]
        self._padded[layer] = padded

    def _time_host(self) -> float:
        """Return the median ms that the host's kernels take for one neuron, alone."""
        ids, times = np.arange(self.config.num_neurons, dtype=np.int32), []
        x = np.random.default_rng(0).normal(size=self._zero.shape).astype(np.float32)
        y, active = np.empty_like(x), np.empty((len(x), len(ids)), np.uint8)
        for _ in range(4):
            begin = perf_counter()
            self._neurons.evaluate(x, ids, len(ids), 0, y, active)
            times.append((perf_counter() - begin) * 1e3 / len(ids))
        return float(np.median(times[1:]))
