"""Predicted mode: what is computed is what predictors forecast, no more and no less, wherever the neurons live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy_reference import forward
from tiny_model import (
    DENSE_PARTS,
    MODELS,
    TINY,
    Churn,
    all_logits,
    hybrid_of,
    relative_error,
    run_step,
    tiny_engine,
)

from kairox_jax.engine import Engine
from kairox_jax.io import (
    LayerPredictor,
    Predictors,
    fingerprint,
    load_predictors,
    open_checkpoint,
    save_predictors,
)
from kairox_jax.models import load_model
from kairox_jax.quant import PackedRows

TOLERANCE = 1e-5  # relative; a score within rounding of its threshold could flip a neuron, none here does
PROMPT, STEPS = 4, 9


def made(
    model: Path, folder: Path, *, input: str, norm: str = "rms", bias: float = 0.0, rest: bool = False
) -> Predictors:
    """Save random predictors, which forecast about half of the neurons where the bias is 0."""
    checkpoint, rng = open_checkpoint(model), np.random.default_rng(8)
    config = checkpoint.config

    def rows(count: int, width: int) -> PackedRows:
        values = (rng.normal(size=(count, width)) / np.sqrt(width)).astype(np.float32)
        return PackedRows(data=values.view(np.uint8), format="f32")

    layers = tuple(
        LayerPredictor(
            fc1=rows(32, config.d_model),
            fc2=rows(config.num_neurons, 32),
            fc1_bias=rng.normal(size=32).astype(np.float16).astype(np.float32),
            bias=np.full(config.num_neurons, bias, np.float32),
            threshold=0.03,
            rest=rows(config.d_model, 32) if rest else None,
            rest_bias=np.full(config.d_model, 0.25, np.float32) if rest else None,
        )
        for _ in range(config.num_layers)
    )
    predictors = Predictors(
        layers=layers, input=input, norm=norm, meta={"fingerprint": fingerprint(checkpoint)}
    )
    save_predictors(folder, predictors)
    return load_predictors(folder)


def reference(model: Path, ids: np.ndarray, predictors: Predictors) -> tuple[np.ndarray, float]:
    """Return logits [T, V] with a dense prompt and forecast neurons after it, and the share of those."""
    shares = []

    def keep(layer: int, streams: dict[str, np.ndarray]) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        x = streams[predictors.input]
        if predictors.norm == "rms":
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        part = predictors.layers[layer]
        fc1, fc2 = (weights.astype(np.float64) for weights in part.weights)
        assert part.bias is not None and part.fc1_bias is not None
        hidden = np.maximum(x @ fc1.T + part.fc1_bias, 0)
        kept = hidden @ fc2.T + part.bias >= part.threshold
        kept[:PROMPT] = True
        shares.append(kept[PROMPT:].mean())
        if part.rest is None or part.rest_bias is None:
            return kept
        rest = hidden @ part.rest.dequantize().astype(np.float64).T + part.rest_bias
        rest[:PROMPT] = 0
        return kept, rest

    return forward(open_checkpoint(model), ids[None], keep)[0], float(np.mean(shares))


@pytest.mark.parametrize("dense_part", DENSE_PARTS)
@pytest.mark.parametrize(
    ("name", "input", "slots", "policy", "rest"),
    [
        ("relu-llama", "adjacent", 0, "static", True),
        ("relu-llama", "adjacent", 80, Churn, False),
        ("relu-llama", "own", 160, "static", True),
        ("llama3-rope", "adjacent", 50, "guide", True),
        ("relu-falcon", "layer_input", 40, Churn, False),
        ("opt", "own", 40, "lru", True),
    ],
)
def test_only_forecast_neurons_count(
    name: str, input: str, slots: int, policy: Any, rest: bool, dense_part: str, tmp_path: Path
) -> None:
    model = MODELS / name
    predictors = made(model, tmp_path, input=input, rest=rest)
    config = open_checkpoint(model).config
    ids = np.random.default_rng(3).integers(3, config.vocab_size, PROMPT + STEPS)
    want, share = reference(model, ids, predictors)
    settings: dict[str, Any] = {"dense_part": dense_part, "policy": policy, "predictors": tmp_path}
    with tiny_engine(model, mode="predicted", gpu_cache_neurons=slots, **settings) as engine:
        hybrid = hybrid_of(engine)
        assert not hybrid.mixes  # prompts are not forecast
        got = [np.array(hybrid.prefill_logits(ids[:PROMPT].astype(np.int32), 0, 0))]
        predicted = hits = 0
        for at in range(PROMPT, len(ids)):
            logits, counts = run_step(engine, int(ids[at]), at)
            got.append(logits)
            hybrid.settle()
            assert counts.predicted is not None
            predicted += counts.predicted
            hits += int(counts.hits.sum())
    assert relative_error(np.stack(got), want[PROMPT - 1 :]) < TOLERANCE
    assert 0.2 < share < 0.8 and predicted / (STEPS * config.num_layers * config.num_neurons) == share
    assert (hits > 0) == (slots > 0)


def test_forecasting_every_neuron_is_dense(tmp_path: Path) -> None:
    made(TINY, tmp_path, input="adjacent", bias=100.0)
    ids = np.random.default_rng(4).integers(3, 100, 12).tolist()
    with tiny_engine(mode="exact", gpu_cache_neurons=60) as engine:
        want = all_logits(engine, ids, prompt=PROMPT)
    with tiny_engine(mode="predicted", gpu_cache_neurons=60, predictors=tmp_path) as engine:
        got = all_logits(engine, ids, prompt=PROMPT)
        result = engine.generate(ids, engine_config())
    assert relative_error(got, want) < TOLERANCE
    record = result.stats.to_json()
    assert record["predicted_frac"] == 1 and "forecast 100.0 %" in result.stats.line()
    assert record["mode"] == "predicted" and record["predictor_recall"] is None


def engine_config() -> Any:
    from kairox_jax.config import GenerationConfig

    return GenerationConfig(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("dense_part", DENSE_PARTS)
def test_each_sequence_of_a_step_has_its_own_forecast(dense_part: str, tmp_path: Path) -> None:
    made(TINY, tmp_path, input="adjacent", rest=True)
    prompts = [np.random.default_rng(seed).integers(3, 100, 5 + seed).tolist() for seed in range(3)]
    settings: dict[str, Any] = {"mode": "predicted", "dense_part": dense_part, "predictors": tmp_path}
    with tiny_engine(gpu_cache_neurons=60, **settings) as engine:
        alone = [engine.generate(ids, engine_config()).token_ids for ids in prompts]
    with tiny_engine(gpu_cache_neurons=60, parallel=3, **settings) as engine:
        running = [engine.begin(ids, engine_config()) for ids in prompts]
        while engine.batch.running:
            list(engine.batch.advance())
        together = [each.result.token_ids for each in running if each.result is not None]
    assert together == alone


def test_the_next_layer_is_planned_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(TINY, tmp_path, input="adjacent")
    with tiny_engine(mode="predicted", policy="lru", gpu_cache_neurons=60, predictors=tmp_path) as engine:
        hybrid, calls = hybrid_of(engine), []
        plan, evaluate = hybrid.policy.plan, hybrid._evaluate

        def planned(state: Any, layer: int, active: Any, *rest: Any) -> Any:
            calls.append(("plan", layer, int(np.count_nonzero(active))))
            return plan(state, layer, active, *rest)

        def evaluated(layer: int, *rest: Any) -> None:
            calls.append(("ffn", layer, 0))
            evaluate(layer, *rest)

        monkeypatch.setattr(hybrid.policy, "plan", planned)
        monkeypatch.setattr(hybrid, "_evaluate", evaluated)
        hybrid.prefill_logits(np.array([5, 6], np.int32), 0, 0)
        run_step(engine, 9, 2)
    assert [call[:2] for call in calls] == [("plan", 1), ("ffn", 0), ("ffn", 1), ("plan", 0)]
    assert all(count > 0 for kind, _, count in calls if kind == "plan")


def test_warming_up_shows_a_policy_nothing(tmp_path: Path) -> None:
    made(TINY, tmp_path, input="adjacent")
    with tiny_engine(mode="predicted", policy="lru", gpu_cache_neurons=60, predictors=tmp_path) as engine:
        hybrid_of(engine).settle()
        assert hybrid_of(engine).migrator.take_counts().promotions == 0


def test_what_cannot_be_honoured_is_refused(tmp_path: Path) -> None:
    made(MODELS / "opt", tmp_path / "opt", input="own")
    with pytest.raises(ValueError, match="no predictors are known.*train-predictors.*--mode exact"):
        Engine(TINY, mode="predicted")
    with pytest.raises(ValueError, match="the predictors were made for another model"):
        Engine(TINY, mode="predicted", predictors=tmp_path / "opt")
    with pytest.raises(ValueError, match="--predictors has no effect with --mode exact"):
        Engine(TINY, predictors=tmp_path / "opt")
    with pytest.raises(ValueError, match="'predicted' is the engine's"):
        load_model(TINY, "predicted")
