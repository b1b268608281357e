"""Promotions during decode: what a commit costs alone, and how much a layer's work grows when one comes each time."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from benchmarks.gpu.callbacks import random_neurons
from benchmarks.gpu.settings import Settings, TimeBox
from benchmarks.gpu.timing import implementations, median_s
from kairox_jax.engine.programs import resident_program
from kairox_jax.placement import NeuronStore, commit_records, empty_slots

ROUNDS = 20  # layers' work in a sample
SLOT_FORMAT = "float32"  # which the records have anyway


def run(settings: Settings, box: TimeBox) -> dict[str, Any]:
    """Return one row for each number of promoted records."""
    neurons, width = settings.callback_shape
    store = random_neurons(neurons, width).store
    capacity = neurons // 2
    name = "pallas" if jax.default_backend() == "gpu" else "xla"
    resident = resident_program("relu", implementations()[name]["implementation"])
    every = np.ones(capacity, bool)
    x = np.random.default_rng(0).normal(size=(1, width)).astype(np.float32)
    slots = empty_slots(capacity, store.layouts[0], SLOT_FORMAT)

    def quiet() -> Any:
        y = None
        for _ in range(ROUNDS):
            y, _ = resident(slots, None, None, every, None, np.float32(0), x)
        return y

    rows, cut = [], False
    layer_us = median_s(quiet, settings.repeats) * 1e6 / ROUNDS
    for records in settings.commit_records:
        if box.over:
            cut = True
            continue
        busy_us = _busy_us(store, records, capacity, resident, every, x, settings.repeats)
        rows.append(
            {
                "records": records,
                "bytes": records * store.record_bytes(0),
                "layer_us": layer_us,
                "with_commit_us": busy_us,
            }
        )
    return {"record_bytes": store.record_bytes(0), "slots": capacity, "rows": rows, "cut": cut}


def _busy_us(
    store: NeuronStore,
    records: int,
    capacity: int,
    resident: Any,
    every: np.ndarray,
    x: np.ndarray,
    repeats: int,
) -> float:
    """Return the time of a layer that also gathers, sends and commits so many records, one round after sending."""
    held = [empty_slots(capacity, store.layouts[0], SLOT_FORMAT)]
    at = np.arange(records, dtype=np.int32) % capacity
    ids = np.arange(records, dtype=np.int32)

    def busy() -> Any:
        y, sent = None, jax.device_put(store.gather(0, ids))
        for _ in range(ROUNDS):
            arriving = jax.device_put(store.gather(0, ids))
            y, _ = resident(held[0], None, None, every, None, np.float32(0), x)
            held[0] = commit_records(
                held[0], sent, at, ids, None, layout=store.layouts[0], slot_format=SLOT_FORMAT
            )
            sent = arriving
        return y, held[0]

    return median_s(busy, repeats) * 1e6 / ROUNDS
