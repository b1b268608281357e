"""All layers in one call: the logits, the active neurons and the cache of the same kernels called layer by layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_predicted import made
from tiny_model import MODELS, hybrid_of, tiny_engine

from kairox_jax.engine.hybrid import Hybrid, StepCounts
from kairox_jax.engine.whole_step import WholeStep
from kairox_jax.host import HostStep, limit_threads, thread_count
from kairox_jax.host.threads import _limit
from kairox_jax.quant import PackedRows

PARALLEL, PROMPT, STEPS = 4, 5, 3
ROUNDING = 2e-6  # of the largest; sums of scalar code may be ordered otherwise


def run(hybrid: Hybrid, n: int) -> tuple[list[np.ndarray], list[StepCounts], list[np.ndarray]]:
    """Fill the cache's rows from the start, take some steps of n sequences, and return all that came of it."""
    rng = np.random.default_rng(3)
    dense: Any = hybrid.dense
    dense.keys[:], dense.values[:] = 0, 0
    prompts = rng.integers(3, hybrid.config.vocab_size, (PARALLEL, PROMPT)).astype(np.int32)
    for row in range(PARALLEL):
        hybrid.prefill_logits(prompts[row, : PROMPT - row], 0, row)
    rows = rng.permutation(PARALLEL)[:n].astype(np.int32)
    at = np.array([PROMPT - row for row in rows], np.int32)
    logits, counts = [], []
    for step in range(STEPS):
        values, count = hybrid.step(
            rng.integers(3, hybrid.config.vocab_size, n).astype(np.int32), at + np.int32(step), rows
        )
        logits.append(values.copy())
        counts.append(count)
    return logits, counts, [dense.keys.copy(), dense.values.copy()]


def compare(one: tuple, other: tuple) -> None:
    for got, want in zip([*one[0], *one[2]], [*other[0], *other[2]], strict=True):
        assert np.abs(got - want).max() <= ROUNDING * np.abs(want).max()
    for got, want in zip(one[1], other[1], strict=True):
        np.testing.assert_array_equal(got.active, want.active)
        np.testing.assert_array_equal(got.residual, want.residual)
        if want.share is not None:
            np.testing.assert_array_equal(got.share, want.share)
        assert got.hits.sum() == want.hits.sum() == 0
        assert 0 < got.residual.sum() < got.active.size


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("falcon-one-kv", "opt")]  # forms of their own


@pytest.mark.parametrize("model", [*SLOW, "mistral-window", "relu-llama"])
def test_it_gives_what_layer_by_layer_does(model: str) -> None:
    with tiny_engine(MODELS / model, parallel=PARALLEL, gpu_cache_neurons=0) as engine:
        hybrid = hybrid_of(engine)
        assert hybrid._whole is not None
        for n in (1, 3):
            whole = run(hybrid, n)
            saved, hybrid._whole = hybrid._whole, None
            compare(whole, run(hybrid, n))
            hybrid._whole = saved


@pytest.mark.parametrize(
    ("model", "input", "rest"),
    [pytest.param("opt", "adjacent", True, marks=pytest.mark.slow), ("relu-llama", "own", False)],
)
def test_forecast_neurons_are_those_of_layer_by_layer(
    model: str, input: str, rest: bool, tmp_path: Path
) -> None:
    made(MODELS / model, tmp_path, input=input, rest=rest)
    settings: dict[str, Any] = dict(mode="predicted", predictors=tmp_path, parallel=PARALLEL)
    with tiny_engine(MODELS / model, gpu_cache_neurons=0, **settings) as engine:
        hybrid = hybrid_of(engine)
        assert hybrid._whole is not None
        for n in (1, 3):
            whole = run(hybrid, n)
            saved, hybrid._whole = hybrid._whole, None
            found = run(hybrid, n)
            compare(whole, found)
            assert [count.predicted for count in whole[1]] == [count.predicted for count in found[1]]
            hybrid._whole = saved


@pytest.mark.slow
def test_layers_of_other_formats_and_one_thread() -> None:
    with tiny_engine(gpu_cache_neurons=0, parallel=PARALLEL) as engine:
        hybrid = hybrid_of(engine)
        dense: Any = hybrid.dense
        out = dense.weights[1].wo
        half = out.dequantize().astype(np.float16)
        dense.weights[1] = replace(dense.weights[1], wo=PackedRows(data=half.view(np.uint8), format="f16"))
        whole = WholeStep(dense, hybrid._ffns)
        assert len(whole._run._groups) == 2
        hybrid._whole = None
        want = run(hybrid, 2)
        hybrid._whole = whole
        found = run(hybrid, 2)
        compare(found, want)
        before, threads = dict(_limit), thread_count()
        try:
            limit_threads(1)
            for got, same in zip(run(hybrid, 2)[0], found[0], strict=True):
                np.testing.assert_array_equal(got, same)
        finally:
            _limit.clear()
            _limit.update(before)
        assert thread_count() == threads


def test_where_there_are_slots_or_forecasts_it_is_not_used() -> None:
    with tiny_engine(gpu_cache_neurons=8) as engine:
        assert hybrid_of(engine)._whole is None


def test_times_add_up() -> None:
    with tiny_engine(gpu_cache_neurons=0) as engine:
        _, counts, _ = run_one(hybrid_of(engine))
        assert counts.times.gpu_ms > 0 and counts.times.cpu_ms > 0 and counts.times.io_ms == 0


def run_one(hybrid: Hybrid) -> tuple[np.ndarray, StepCounts, None]:
    one = np.array([5], np.int32)
    logits, counts = hybrid.step(one, one, one * 0)
    return logits, counts, None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", np.zeros((1, 7), np.float32), "x is float32"),
        ("y", np.zeros((1, 8), np.float64), "y is float64"),
        ("fired", np.zeros((2, 1, 3), np.uint8), "fired is uint8"),
        ("cache_rows", np.zeros(1, np.int64), "cache_rows are int64"),
        ("positions", np.zeros(2, np.int32), "positions are int32"),
        ("cos", np.zeros((2, 2), np.float32), "cos is float32"),
    ],
)
def test_arguments_that_do_not_fit(name: str, value: np.ndarray, message: str) -> None:
    with tiny_engine(gpu_cache_neurons=0) as engine:
        hybrid = hybrid_of(engine)
        config = hybrid.config
        assert hybrid._whole is not None
        step: HostStep = hybrid._whole._run
        one, turn = np.zeros(1, np.int32), np.zeros((1, config.head_dim // 2), np.float32)
        given: dict[str, Any] = dict(
            x=np.zeros((1, config.d_model), np.float32),
            y=np.zeros((1, config.d_model), np.float32),
            fired=np.zeros((config.num_layers, 1, config.num_neurons), np.uint8),
            cache_rows=one,
            positions=one,
            cos=turn,
            sin=turn,
        )
        given[name] = value
        with pytest.raises(ValueError, match=message):
            step(given.pop("x"), given.pop("y"), given.pop("fired"), **given)
