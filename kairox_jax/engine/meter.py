"""Measured times as the policies see them: what a plan costs now, and what a step took.

The clocks are read in ``Hybrid`` without waiting for the device; this file alone says what follows from them.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from kairox_jax.balancing import Costs, Times
from kairox_jax.engine.counts import Pass
from kairox_jax.engine.migrate import Migrator

# Of the expected time until the next layer, for its transfers: a little late is all late. With the whole of it, half of
# the layers found their transfer on its way still, with this a quarter (bench_regimes, a link as fast as the host).
SURE = 0.8


class Meter:
    """Costs for plans and times for feedback, from what was measured.

    Args:
        resident_ms: time of each layer's device part alone, float [L]; see ``time_residents``.
        shares_cores: the device is the CPU, so that a transfer's work takes the host's time.
    """

    def __init__(self, resident_ms: Float[np.ndarray, " L"], *, shares_cores: bool = False) -> None:
        self.resident_ms, self._shares_cores = resident_ms, shares_cores
        self._last = Times(0.0, 0.0, 0.0)  # of the last step
        self._last_evaluated = 1  # neurons that the host evaluated in it
        self._overlapped_ms, self._front_ms = 0.0, 0.0  # of this step so far; of a layer in the last step

    def overlapped_ms(self, layer: int, mask: Any, host_ms: float) -> float:
        """Return the device time that passed beside the host's, without waiting for the device.

        A device part that is not done yet took all of the host's time, and the rest shows in the next layer's wait;
        one that is done took what it takes alone, measured at the start, and at most the host's time.

        Args:
            layer: index of the layer, whose residual is done.
            mask: a result of its device part, or None where nothing is resident.
            host_ms: time of the residual.
        """
        if mask is None:
            return 0.0
        ms = min(float(self.resident_ms[layer]), host_ms) if mask.is_ready() else host_ms
        self._overlapped_ms += ms
        return ms

    def end_step(
        self, run: Pass, residual: Int[np.ndarray, " L"], io_ms: Float[np.ndarray, " L"]
    ) -> tuple[list[Times], Times]:
        """Return the times of each layer and of the step, and keep them for the next plans.

        Args:
            run: the pass through all layers; its ``users`` are complete.
            residual: active neurons that the host computed.
            io_ms: link time of each layer's arrivals since the step before.
        """
        by_layer = [Times(*ms) for ms in zip(run.gpu_ms, io_ms.tolist(), run.cpu_ms, strict=True)]
        self._last = Times(sum(run.gpu_ms), float(io_ms.sum()), sum(run.cpu_ms))
        self._last_evaluated = run.evaluated
        self._front_ms = max(self._last.gpu_ms - self._overlapped_ms, 0.0) / len(by_layer)
        self._overlapped_ms = 0.0
        return by_layer, self._last

    def costs(self, layer: int, migrator: Migrator, *, beside: int | None) -> Costs:
        """Return what moving and computing a layer's neurons costs now.

        Args:
            layer: index of the layer.
            migrator: knows the slots, the link and its queue.
            beside: neurons of the layer before that the host is about to compute, which gives time for transfers;
                None for a plan before the step: then every layer before it does, at the last step's pace.
        """
        table, num_layers = migrator.table, len(self.resident_ms)
        cpu_ms = self._last.cpu_ms / max(self._last_evaluated, 1)
        if beside is None:
            until_ms = (self._last.gpu_ms + self._last.cpu_ms) * (layer + 1) / num_layers
        else:
            until_ms = max(beside * cpu_ms, float(self.resident_ms[layer - 1])) + self._front_ms
            until_ms *= SURE
        taken = migrator.cost if self._shares_cores and not migrator.link.waits else None
        return Costs(
            max_moves=migrator.room(layer),
            free_slots=table.free(layer),
            gpu_ms_per_record=float(self.resident_ms[layer]) / max(int(table.capacity[layer]), 1),
            cpu_ms_per_record=cpu_ms,
            link_ms_per_record=migrator.cost.ms_per_record,
            link_ms_fixed=migrator.cost.fixed_ms,
            window_ms=until_ms - migrator.backlog_ms,
            record_bytes=migrator.store.record_bytes(layer),
            step_ms_fixed=migrator.commit_ms + (0.0 if taken is None else taken.fixed_ms),
            step_ms_per_record=0.0 if taken is None else taken.ms_per_record,
            foreseen=beside is not None,
        )


def time_residents(
    run_layer: Callable[[int], Any], slots: Int[np.ndarray, " L"], *, repeats: int = 3
) -> Float[np.ndarray, " L"]:
    """Return the median time of each layer's device part alone, in ms, after compiling it.

    Layers with the same number of slots take the same time: each number is measured once.

    Args:
        run_layer: dispatches the part of a layer with every slot in use, and returns a result of it.
        slots: of each layer.
        repeats: runs after the first, which compiles.
    """
    measured: dict[int, float] = {0: 0.0}
    for layer, count in enumerate(slots.tolist()):
        if count in measured:
            continue
        times = []
        for _ in range(repeats + 1):
            begin = perf_counter()
            run_layer(layer).block_until_ready()
            times.append((perf_counter() - begin) * 1e3)
        measured[count] = float(np.median(times[1:]))
    return np.array([measured[count] for count in slots.tolist()])
