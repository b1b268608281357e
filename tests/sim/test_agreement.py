"""The engine and the simulator take the same decisions on the same text: plans, costs, times, hits and moves.

The engine runs for real; only its clocks are replaced, by numbers that are exact in binary.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kairox_jax.balancing import POLICIES, Costs, Times, initial_residents, share_slots
from kairox_jax.cli import main
from kairox_jax.config import PlacementConfig
from kairox_jax.engine.forecast import Forecasted
from kairox_jax.engine.link import Link, LinkCost
from kairox_jax.engine.loading import build_policy
from kairox_jax.engine.meter import Meter
from kairox_jax.io.trace import TraceRecorder, read_trace
from kairox_jax.sim import ReplaySettings, replay
from kairox_jax.sim.events import Simulator
from kairox_jax.sim.machine import LayerCosts

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from tiny_model import NUM_LAYERS, NUM_NEURONS, VOCAB, hybrid_of, run_step, tiny_engine  # noqa: E402

POLICIES_HERE = sorted(set(POLICIES) - {"oracle", "layers"})  # the future, and timed dense by the simulator
SLOTS, MAX_MOVES, STEPS = 48, 16, 24
COSTS = LayerCosts(
    attention_ms=1 / 4,
    gpu_ms_per_neuron=1 / 64,
    gpu_ms_second=0.0,
    cpu_ms_per_neuron=1 / 32,
    cpu_ms_fixed=1 / 8,
    link_ms_fixed=1 / 4,
    link_ms_per_record=1 / 8,
    head_ms=8.0,  # in which all transfers of a step arrive
    record_bytes=4096.0,
    layer_scale=1.0,
    dense_gpu_ms=1.0,
    dense_cpu_ms=1.0,
    dense_slots=1.0,
)


def transfer_ms(records: int) -> float:
    return COSTS.link_ms_fixed + records * COSTS.link_ms_per_record


class FixedCost(LinkCost):
    """Stays as it was made: a refit would round."""

    def add(self, records: int, ms: float) -> None:
        assert ms == transfer_ms(records) == self.fixed_ms + records * self.ms_per_record


class FixedMeter(Meter):
    """Says ``COSTS`` where the real one says what it measured."""

    def end_step(self, run: Any, residual: Any, io_ms: Any) -> tuple[list[Times], Times]:
        hits = np.count_nonzero(run.users, axis=1) - residual
        run.gpu_ms = [COSTS.attention_ms + n * COSTS.gpu_ms_per_neuron for n in hits.tolist()]
        run.cpu_ms = [n * COSTS.cpu_ms_per_neuron + (n > 0) * COSTS.cpu_ms_fixed for n in residual.tolist()]
        by_layer, step = super().end_step(run, residual, io_ms)
        return by_layer, replace(step, gpu_ms=step.gpu_ms + COSTS.head_ms)

    def costs(self, layer: int, migrator: Any, *, beside: int | None) -> Costs:
        return replace(
            super().costs(layer, migrator, beside=beside),
            gpu_ms_per_record=COSTS.gpu_ms_per_neuron,
            cpu_ms_per_record=COSTS.cpu_ms_per_neuron,
            cpu_ms_fixed=COSTS.cpu_ms_fixed,
            record_bytes=int(COSTS.record_bytes),
        )


class FixedLink(Link):
    """Delivers when the test says so, and reports the time that ``COSTS`` says."""

    def __init__(self, table: Any) -> None:
        self.open = Event()
        self.sizes: list[int] = []

    def send(self, gather: Any) -> Any:
        assert self.open.wait(15), "the test never opened the link"
        return super().send(gather)[0], transfer_ms(self.sizes.pop(0))


class Watched:
    """A policy that writes down everything it is told and says."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.log = policy, []

    def init(self, shape: Any, prior: Any) -> Any:
        return self.policy.init(shape, prior)

    def plan(self, state: Any, layer: int, active: Any, resident: Any, costs: Costs) -> Any:
        seen = (np.flatnonzero(active).tolist(), np.flatnonzero(resident).tolist())
        state, plan = self.policy.plan(state, layer, active, resident, costs)
        self.log.append(("plan", layer, *seen, costs, plan.load.tolist(), plan.evict.tolist()))
        return state, plan

    def feedback(self, state: Any, layer: int | None, times: Times) -> Any:
        self.log.append(("feedback", layer, times))
        return self.policy.feedback(state, layer, times)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


def run_engine(name: str, path: Path) -> tuple[list[Any], list[dict[str, Any]]]:
    """Decode fixed tokens with every transfer there before the next step; write the trace."""
    tokens = np.random.default_rng(11).integers(3, VOCAB, STEPS)
    tokens[STEPS // 2 :] = tokens[0]  # a text, then another that repeats itself
    recorder, steps = TraceRecorder({}), []
    with tiny_engine(policy=name, gpu_cache_neurons=SLOTS, max_moves=MAX_MOVES) as engine:
        hybrid = hybrid_of(engine)
        policy = hybrid.policy = Watched(hybrid.policy)  # type: ignore[assignment]
        link = hybrid.migrator.link = FixedLink(hybrid.table)
        submit = hybrid.migrator.submit

        def watched_submit(layer: int, plan: Any) -> None:
            if len(plan.load):
                link.sizes.append(len(plan.load))
            submit(layer, plan)

        hybrid.migrator.submit = watched_submit  # type: ignore[method-assign]
        hybrid.meter = FixedMeter(hybrid.meter.resident_ms)
        hybrid.migrator.cost = FixedCost([(n, transfer_ms(n)) for n in (8, 16)])
        hybrid.migrator.commit_ms = 0.0  # the simulator knows no such cost
        hybrid.migrator.take_counts()
        for at, token in enumerate(tokens.tolist()):
            link.open.set()
            hybrid.settle()
            link.open.clear()
            resident = [np.flatnonzero(hybrid.table.resident(i)).tolist() for i in range(NUM_LAYERS)]
            counts = run_step(engine, token, at)[1]
            recorder.add_step(counts.active, token)
            steps.append(
                {
                    "hits": int(counts.hits.sum()),
                    "active": int(counts.active.sum()),
                    "promoted": counts.moves.promotions,
                    "evicted": counts.moves.evictions,
                    "wasted": counts.moves.wasted_promotions,
                    "io_ms": counts.times.io_ms,
                    "resident": resident,
                }
            )
        link.open.set()
    recorder.write(path)
    # The last plans are for a step that never comes.
    return policy.log[:-NUM_LAYERS], steps


def run_simulator(name: str, path: Path) -> tuple[list[Any], list[dict[str, Any]]]:
    trace = read_trace(path)
    policy = Watched(build_policy(PlacementConfig(policy=name), has_prior=False))
    shape = share_slots(policy.policy, SLOTS * NUM_LAYERS, NUM_LAYERS, NUM_NEURONS, None)
    resident = initial_residents(policy.policy, shape, None)
    simulator = Simulator(
        policy,
        shape,
        resident,
        None,
        COSTS,
        queue_ms=1000.0,
        debug=True,
        forecast="previous",
        max_moves=MAX_MOVES,
    )
    steps = []
    for step in range(trace.num_steps):
        record = simulator.step(trace.active(step))
        steps.append({key: getattr(record, key) for key in ("hits", "active", "promoted", "evicted")})
        steps[-1] |= {"wasted": record.wasted, "io_ms": record.io_ms}
        steps[-1]["resident"] = [np.flatnonzero(row).tolist() for row in simulator.cache.resident]
        assert record.late == 0
    return policy.log, steps


@pytest.mark.parametrize("name", POLICIES_HERE)
def test_engine_and_simulator_agree_step_by_step(name: str, tmp_path: Path) -> None:
    engine_log, engine_steps = run_engine(name, tmp_path / "trace.npz")
    simulator_log, simulator_steps = run_simulator(name, tmp_path / "trace.npz")
    for number, (got, want) in enumerate(zip(engine_log, simulator_log, strict=True)):
        assert got == want, f"call {number}: the engine's is not the simulator's"
    for number, (got, want) in enumerate(zip(engine_steps, simulator_steps, strict=True)):
        assert got == want, f"step {number}"
    moved = sum(step["promoted"] for step in engine_steps)
    assert (moved == 0) == (name == "static")
    assert not any(entry[4].can_wait for entry in engine_log if entry[0] == "plan")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[int]]:
    """Return the trace of some tokens, and the tokens."""
    tokens = np.random.default_rng(12).integers(3, VOCAB, STEPS).tolist()
    path, recorder = tmp_path_factory.mktemp("trace") / "trace.npz", TraceRecorder({})
    with tiny_engine(gpu_cache_neurons=0) as engine:
        for at, token in enumerate(tokens):
            recorder.add_step(run_step(engine, token, at)[1].active, token)
    recorder.write(path)
    return read_trace(path), tokens


class Played:
    """Forecasts what the trace says was active: exactly that fires, because the text is the same."""

    predictors = SimpleNamespace(input="adjacent")

    def __init__(self, trace: Any) -> None:
        self.trace, self.step = trace, 0

    def __call__(self, layer: int, x: Any) -> Any:
        return Forecasted(self.trace.active(self.step)[layer][None], None)


# Transfers that all arrive within a layer, and transfers that none does, but before the next step.
IN_TIME = replace(COSTS, link_ms_fixed=0.0, link_ms_per_record=1 / 1024, record_bytes=4096.0)
LATE = replace(COSTS, link_ms_fixed=64.0, head_ms=1024.0)


def same_costs(layer: int, free_slots: int, foreseen: bool, costs: LayerCosts) -> Costs:
    """What both sides say, so that plans can be compared: clocks agree in the test above."""
    return Costs(
        max_moves=MAX_MOVES,
        free_slots=free_slots,
        gpu_ms_per_record=costs.gpu_ms_per_neuron,
        cpu_ms_per_record=costs.cpu_ms_per_neuron,
        cpu_ms_fixed=costs.cpu_ms_fixed,
        link_ms_per_record=costs.link_ms_per_record,
        link_ms_fixed=costs.link_ms_fixed,
        window_ms=costs.link_ms_fixed + 12 * costs.link_ms_per_record,
        record_bytes=4096,
        foreseen=foreseen,
    )


class SameMeter(FixedMeter):
    """Costs of ``same_costs`` and no link time: transfers end where the test says."""

    layer_costs = COSTS

    def end_step(self, run: Any, residual: Any, io_ms: Any) -> tuple[list[Times], Times]:
        return super().end_step(run, residual, np.zeros_like(io_ms))

    def costs(self, layer: int, migrator: Any, *, beside: int | None) -> Costs:
        return same_costs(layer, migrator.table.free(layer), beside is not None, self.layer_costs)


class SameSimulator(Simulator):
    """The same for the simulator."""

    def _layer_costs(self, layer: int, start: float, link_start: float, foreseen: bool) -> Costs:
        return same_costs(layer, self.cache.free(layer), foreseen, self.costs)

    def _ffn(self, *args: Any) -> Any:
        end, times = super()._ffn(*args)
        return end, replace(times, io_ms=0.0)


def predicted_engine(name: str, trace: Any, tokens: list[int], costs: LayerCosts) -> tuple[Any, Any]:
    """Decode the trace's text with forecasts from the trace; transfers arrive at once, or after the step."""
    steps, in_time = [], costs is IN_TIME
    with tiny_engine(policy=name, gpu_cache_neurons=SLOTS, max_moves=MAX_MOVES) as engine:
        hybrid = hybrid_of(engine)
        policy = hybrid.policy = Watched(hybrid.policy)  # type: ignore[assignment]
        played = hybrid.forecast = Played(trace)  # type: ignore[assignment]
        hybrid._ahead = True
        hybrid.meter = SameMeter(hybrid.meter.resident_ms)
        hybrid.meter.layer_costs = costs
        gate, send, submit = Event(), hybrid.migrator.link.send, hybrid.migrator.submit

        def held(gather: Any) -> Any:
            assert gate.wait(15), "the test never opened the link"
            return send(gather)

        def submitted(layer: int, plan: Any) -> None:
            submit(layer, plan)
            for arrival in hybrid.migrator._pending[layer] if in_time else ():
                arrival.transfer.result(15)

        hybrid.migrator.link.send = held  # type: ignore[method-assign]
        hybrid.migrator.submit = submitted  # type: ignore[method-assign]
        hybrid.migrator.take_counts()
        for at, token in enumerate(tokens):
            gate.set()
            hybrid.settle()
            if not in_time:
                gate.clear()
            played.step = at
            counts = run_step(engine, token, at)[1]
            np.testing.assert_array_equal(counts.active, trace.active(at))
            steps.append((int(counts.hits.sum()), int(counts.active.sum())))
        gate.set()
    return policy.log[:-1], steps  # the last plan is for a step that never comes


CASES = [(name, LATE) for name in POLICIES_HERE] + [(name, IN_TIME) for name in ("dynamic", "paper", "split")]


@pytest.mark.parametrize(
    ("name", "costs"), CASES, ids=lambda x: x if isinstance(x, str) else "late" if x is LATE else "in time"
)
def test_engine_and_simulator_agree_with_forecasts_of_the_next_layer(
    name: str, costs: LayerCosts, text: tuple[Any, list[int]]
) -> None:
    trace, tokens = text
    engine_log, engine_steps = predicted_engine(name, trace, tokens, costs)
    policy = Watched(build_policy(PlacementConfig(policy=name), has_prior=False))
    shape = share_slots(policy.policy, SLOTS * NUM_LAYERS, NUM_LAYERS, NUM_NEURONS, None)
    resident = initial_residents(policy.policy, shape, None)
    settings: dict[str, Any] = {
        "queue_ms": 1000.0,
        "debug": True,
        "forecast": "adjacent",
        "max_moves": MAX_MOVES,
    }
    simulator = SameSimulator(policy, shape, resident, None, costs, **settings)
    steps, late = [], 0
    for step in range(trace.num_steps):
        record = simulator.step(trace.active(step))
        steps.append((record.hits, record.active))
        late += record.late
    plans = [[entry for entry in log if entry[0] == "plan"] for log in (engine_log, policy.log)]
    for number, (got, want) in enumerate(zip(*plans, strict=True)):
        assert got == want, f"plan {number}: the engine's is not the simulator's"
    assert engine_steps == steps
    promoted = sum(len(entry[5]) for entry in plans[0])
    assert (promoted == 0) == (name == "static") and (late > 0) == (promoted > 0 and costs is LATE)


TRACE = Path(__file__).parents[1] / "data" / "traces" / "smollm2-prose.npz"
BASE: dict[str, Any] = {"policy": "lru", "hardware": "pc-high", "capacity": 0.3, "steps": 8, "debug": True}


def test_the_first_step_of_the_engines_way_moves_nothing_and_later_ones_know_less() -> None:
    trace = read_trace(TRACE)
    perfect, previous = (
        replay([trace], ReplaySettings(**BASE, forecast=name, can_wait=False), [None])
        for name in ("perfect", "previous")
    )
    assert previous.records[0].promoted == previous.records[0].evicted == 0 < perfect.records[0].promoted
    assert previous.records[1].promoted > 0
    assert previous.totals()["hit_rate"] < perfect.totals()["hit_rate"]


def test_moves_are_bounded_and_nothing_is_waited_for_in_the_engines_way() -> None:
    trace = read_trace(TRACE)
    result = replay([trace], ReplaySettings(**BASE, forecast="previous", max_moves=5), [None])
    assert 0 < max(record.promoted for record in result.records) <= 5 * trace.num_layers
    waiting = {**BASE, "policy": "split", "hardware": "pc-low", "as_model": "llama-13b"}
    reports = {
        name: [
            r.report["waits"]
            for r in replay([trace], ReplaySettings(**waiting, forecast=name), [None]).records
        ]
        for name in ("perfect", "previous")
    }
    assert sum(reports["perfect"]) > 0 == sum(reports["previous"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forecast": "none"}, "--forecast 'none'"),
        ({"max_moves": 0}, "--max-moves 0"),
        ({"hardware": "guide", "forecast": "previous"}, "--hardware guide"),
        ({"hardware": "guide", "max_moves": 4}, "--hardware guide"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplaySettings(**{**BASE, **change})


def test_replay_takes_the_forecast_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["replay", str(TRACE), "--policy", "lru", "--hardware", "pc-high", "--steps", "3", "--json"]
    totals = []
    for more in (["--forecast", "previous", "--max-moves", "9"], []):
        assert main([*command, *more]) == 0
        totals.append(json.loads(capsys.readouterr().out)["steps"][0]["promoted"])
    assert totals[0] == 0 < totals[1]
