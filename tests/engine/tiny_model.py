"""A tiny ReLU model behind the real engine, policies that do as a test says, and ways to look inside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kairox_jax.balancing import POLICIES, Plan, Shape
from kairox_jax.config import GenerationConfig, PlacementConfig
from kairox_jax.engine import Engine, opening
from kairox_jax.engine.dense_part import DeviceDense
from kairox_jax.engine.host_dense import HostDense
from kairox_jax.engine.hybrid import Hybrid, StepCounts
from kairox_jax.engine.migrate import Migrator
from kairox_jax.io import open_checkpoint
from kairox_jax.placement import Arena

MODELS = Path(__file__).parents[1] / "data/models"
TINY = MODELS / "relu-llama"
NUM_LAYERS, NUM_NEURONS, VOCAB = 2, 160, 131


class DeviceInstead(DeviceDense):
    """Stands where the engine makes a ``HostDense``."""

    def __init__(self, checkpoint: Any, *, activations: str, arena: Arena, **sizes: int) -> None:
        super().__init__(checkpoint, **sizes)


DENSE_PARTS = {"device": DeviceInstead, "host": HostDense}
GREEDY = GenerationConfig(max_tokens=16, temperature=0, ignore_eos=True)


class Letters:
    """Stands in for the tokenizer that the tiny checkpoints lack: a token is one ASCII character."""

    eos_ids = frozenset({2})

    def encode(self, text: str) -> list[int]:
        return list(text.encode("ascii"))

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([33 + token_id % 90])


class Churn:
    """Evicts and loads random neurons at each step, as many as it may."""

    def init(self, shape: Shape, prior: Any) -> np.random.Generator:
        return np.random.default_rng(5)

    def plan(
        self, state: np.random.Generator, layer: int, active: Any, resident: np.ndarray, costs: Any
    ) -> tuple[np.random.Generator, Plan]:
        held, outside = np.flatnonzero(resident), np.flatnonzero(~resident)
        num_out = min(held.size // 3, costs.max_moves)
        num_in = min(num_out + costs.free_slots, costs.max_moves, outside.size)
        load = state.choice(outside, num_in, replace=False)
        return state, Plan(load, state.choice(held, num_out, replace=False))

    def feedback(self, state: np.random.Generator, layer: int | None, times: Any) -> np.random.Generator:
        return state


class Scripted:
    """Moves what ``script(step, layer, active, held)`` says; starts with empty slots."""

    warm_start = False
    script: Callable[[int, int, np.ndarray, np.ndarray], tuple[Sequence[int], Sequence[int]]]

    def __init__(self) -> None:
        self.steps = [0] * NUM_LAYERS

    def init(self, shape: Shape, prior: Any) -> None:
        return None

    def plan(
        self, state: None, layer: int, active: Any, resident: np.ndarray, costs: Any
    ) -> tuple[None, Plan]:
        load, evict = type(self).script(self.steps[layer], layer, active, resident)
        self.steps[layer] += 1
        return None, Plan(np.array(load, np.int32), np.array(evict, np.int32))

    def feedback(self, state: None, layer: int | None, times: Any) -> None:
        return None


@contextmanager
def tiny_engine(
    model: str | Path = TINY,
    *,
    mode: str = "exact",
    dense_part: str = "host",
    policy: type | str = "static",
    context_length: int = 64,
    parallel: int = 1,
    predictors: str | Path | None = None,
    **placement: Any,
) -> Iterator[Engine]:
    """Open the real engine on a tiny checkpoint; a policy class is registered for as long as it is open."""
    with pytest.MonkeyPatch.context() as patch:

        def opened(name: str | Path) -> Any:
            checkpoint = open_checkpoint(name)
            return replace(checkpoint, _load_tokenizer=Letters)

        patch.setattr(opening, "open_checkpoint", opened)
        patch.setattr(opening, "HostDense", DENSE_PARTS[dense_part])
        if isinstance(policy, type):
            patch.setitem(POLICIES, "under-test", policy)
        name = "under-test" if isinstance(policy, type) else policy
        if mode != "dense":  # which takes no policy
            placement = {"policy": name, **placement}
        settings = PlacementConfig(**placement)
        with Engine(
            model,
            mode=mode,
            placement=settings,
            context_length=context_length,
            predictors=predictors,
            parallel=parallel,
        ) as engine:
            yield engine


def hybrid_of(engine: Engine) -> Hybrid:
    """Return the runner of a mode with neurons in slots."""
    assert engine._hybrid is not None
    return engine._hybrid


def run_step(engine: Engine, token: int, position: int) -> tuple[np.ndarray, StepCounts]:
    """Decode one token; the logits [V] are a copy."""
    logits, counts = hybrid_of(engine).step(*(np.array([n], np.int32) for n in (token, position, 0)))
    return np.array(logits[0]), counts


def all_logits(engine: Engine, ids: Sequence[int], *, prompt: int) -> np.ndarray:
    """Return the logits [T - prompt + 1, V] after a prefill of ``prompt`` tokens and after each step."""
    rows = [np.array(hybrid_of(engine).prefill_logits(np.asarray(ids[:prompt], np.int32), 0, 0))]
    rows += [run_step(engine, int(ids[at]), at)[0] for at in range(prompt, len(ids))]
    return np.stack(rows)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Return the distance over the length; NaN counts as infinite."""
    error = float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))
    return error if np.isfinite(error) else float("inf")


def hold_transfers(migrator: Migrator, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let no transfer finish until the returned function is called."""
    gate, send = threading.Event(), migrator._send

    def slow(*args):  # type: ignore[no-untyped-def]
        assert gate.wait(timeout=15), "the test never let the transfers go"
        return send(*args)

    patch.setattr(migrator, "_send", slow)
    return gate.set
