"""Layers as single programs compute what the Python-driven step computes, wherever the neurons live."""

import numpy as np
import pytest
from numpy_reference import forward
from tiny_model import (
    MODELS,
    NUM_LAYERS,
    TINY,
    VOCAB,
    Churn,
    all_logits,
    hybrid_of,
    relative_error,
    run_step,
    tiny_engine,
)

from kairox_jax.config import HOST_CALLBACKS
from kairox_jax.engine.jitted_hybrid import JittedHybrid
from kairox_jax.engine.loading import check_host_callback
from kairox_jax.io import open_checkpoint

IN_A_JIT = [name for name in HOST_CALLBACKS if name != "split"]
IDS = np.random.default_rng(3).integers(3, VOCAB, 14)
PROMPT = 5


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    """Logits [T, V] of ``IDS`` in NumPy float64."""
    return forward(open_checkpoint(TINY), IDS[None])[0]


@pytest.fixture(scope="module")
def split_active() -> np.ndarray:
    """What the Python-driven step finds active, [steps, L, F]."""
    with tiny_engine(gpu_cache_neurons=40) as engine:
        return active_of(engine)


def active_of(engine) -> np.ndarray:  # type: ignore[no-untyped-def]
    hybrid_of(engine).prefill_logits(IDS[:PROMPT].astype(np.int32), 0, 0)
    return np.stack([run_step(engine, int(IDS[at]), at)[1].active for at in range(PROMPT, len(IDS))])


@pytest.mark.parametrize("backend", IN_A_JIT)
@pytest.mark.parametrize("slots", [0, 40, 160])
def test_logits_and_active_neurons_are_those_of_the_split_step(
    backend: str, slots: int, reference: np.ndarray, split_active: np.ndarray
) -> None:
    with tiny_engine(gpu_cache_neurons=slots, host_callback=backend) as engine:
        assert isinstance(hybrid_of(engine), JittedHybrid)
        assert hybrid_of(engine).num_resident == slots * NUM_LAYERS
        got = all_logits(engine, IDS.tolist(), prompt=PROMPT)
        np.testing.assert_array_equal(active_of(engine), split_active)
    assert relative_error(got, reference[PROMPT - 1 :]) < 2e-5


@pytest.mark.parametrize("backend", IN_A_JIT)
def test_neurons_may_move_between_steps(backend: str, reference: np.ndarray) -> None:
    moves = 0
    with tiny_engine(policy=Churn, gpu_cache_neurons=80, host_callback=backend) as engine:
        got = [np.array(hybrid_of(engine).prefill_logits(IDS[:PROMPT].astype(np.int32), 0, 0))]
        for at in range(PROMPT, len(IDS)):
            logits, counts = run_step(engine, int(IDS[at]), at)
            got.append(logits)
            moves += counts.moves.promotions
            assert (
                counts.times.cpu_ms > 0 and (counts.hits + counts.residual == counts.active.sum(axis=1)).all()
            )
            hybrid_of(engine).settle()
    assert relative_error(np.stack(got), reference[PROMPT - 1 :]) < 2e-5
    assert moves > 100, "the policy did not churn"


@pytest.mark.slow
@pytest.mark.parametrize("backend", IN_A_JIT)
@pytest.mark.parametrize("name", ["opt", "relu-falcon", "sparse-qwen2"])
def test_other_families(backend: str, name: str) -> None:
    """Biases of neurons and outputs, layer norm, learned positions, a parallel block, ungated neurons."""
    folder = MODELS / name
    want = forward(open_checkpoint(folder), IDS[None])[0]
    with tiny_engine(folder, gpu_cache_neurons=40, slot_format="packed", host_callback=backend) as engine:
        assert isinstance(hybrid_of(engine), JittedHybrid) and hybrid_of(engine).num_resident
        got = all_logits(engine, IDS.tolist(), prompt=PROMPT)
    assert relative_error(got, want[PROMPT - 1 :]) < 2e-5


@pytest.mark.parametrize("backend", IN_A_JIT)
def test_sequences_together_are_each_alone(backend: str, reference: np.ndarray) -> None:
    """Rows of the cache in another order than the sequences, at different positions."""
    at, rows = np.array([PROMPT, PROMPT + 3], np.int32), np.array([2, 0], np.int32)
    with tiny_engine(gpu_cache_neurons=40, host_callback=backend, parallel=3) as engine:
        hybrid = hybrid_of(engine)
        for row, end in zip(rows, at, strict=True):
            hybrid.prefill_logits(IDS[:end].astype(np.int32), 0, int(row))
        logits, counts = hybrid.step(IDS[at].astype(np.int32), at, rows)
        assert counts.share is not None and set(np.unique(counts.share)) == {0, 0.5, 1}
        assert (counts.hits + counts.residual == counts.active.sum(axis=1)).all()
        assert relative_error(logits, reference[at]) < 2e-5


def test_forecasts_are_refused() -> None:
    with pytest.raises(ValueError, match="--host-callback pure computes every gate, .*: use split"):
        check_host_callback("pure", "predicted", "cpu")
    check_host_callback("split", "predicted", "cpu")


def test_dense_refuses_the_setting() -> None:
    with (
        pytest.raises(ValueError, match="no effect with --mode dense: --host-callback"),
        tiny_engine(mode="dense", host_callback="ffi"),
    ):
        pass
