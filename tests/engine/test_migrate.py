"""Promotions in the background: never used before they arrive, never waited for, bounded, padding dropped."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy_reference import forward
from tiny_model import (
    DENSE_PARTS,
    NUM_LAYERS,
    NUM_NEURONS,
    TINY,
    VOCAB,
    Scripted,
    all_logits,
    hold_transfers,
    hybrid_of,
    relative_error,
    run_step,
    tiny_engine,
)

from kairox_jax.balancing import Plan
from kairox_jax.engine import Engine
from kairox_jax.engine.migrate import MAX_IN_FLIGHT, buffer_lengths
from kairox_jax.io import open_checkpoint

IDS = np.random.default_rng(8).integers(3, VOCAB, 14)
NO_IDS = np.empty(0, np.int32)


def loads(*neurons: int) -> Plan:
    return Plan(np.array(neurons, np.int32), NO_IDS)


def evicts(*neurons: int) -> Plan:
    return Plan(NO_IDS, np.array(neurons, np.int32))


@pytest.fixture
def engine() -> Iterator[Engine]:
    """40 free slots a layer and a policy that leaves them to the test."""
    still = type("Still", (Scripted,), {"script": staticmethod(lambda *args: ([], []))})
    with tiny_engine(policy=still, gpu_cache_neurons=40, max_moves=8) as engine:
        yield engine


def test_steps_go_on_while_a_transfer_is_on_the_way(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid, reference = hybrid_of(engine), forward(open_checkpoint(TINY), IDS[None])[0]
    busy = np.flatnonzero(run_step(engine, int(IDS[0]), 0)[1].active[0])[:8]
    other = int(np.setdiff1d(np.arange(NUM_NEURONS), busy)[0])
    hybrid.migrator.submit(0, loads(other))
    hybrid.settle()
    # An eviction in between makes the step look at the slot table anew while the transfer is on its way.
    leave = staticmethod(lambda step, layer, active, held: ([], [other] if (step, layer) == (3, 0) else []))
    monkeypatch.setattr(type(hybrid.policy), "script", leave)
    release = hold_transfers(hybrid.migrator, monkeypatch)
    hybrid.migrator.submit(0, loads(*busy))
    begin = time.monotonic()
    for at in range(1, 6):
        logits, counts = run_step(engine, int(IDS[at]), at)
        assert relative_error(logits, reference[at]) < 2e-5
        assert hybrid.num_resident == int(at < 3) and counts.hits.sum() <= int(at <= 3)
        assert set(busy.tolist()) <= set(np.flatnonzero(hybrid.table.held(0)).tolist())
    assert time.monotonic() - begin < 14, "a step waited for the transfer"
    release()
    while not hybrid.migrator._pending[0][0].transfer.done():
        time.sleep(0.001)
    logits, counts = run_step(engine, int(IDS[6]), 6)
    assert counts.moves.promotions == hybrid.num_resident == 8
    assert counts.hits[0] == counts.active[0, busy].sum() and counts.hits[1] == 0
    assert relative_error(logits, reference[6]) < 2e-5


def test_the_queue_of_a_layer_is_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    migrator = hybrid_of(engine).migrator
    release = hold_transfers(migrator, monkeypatch)
    for transfer in range(MAX_IN_FLIGHT):
        assert migrator.room(0) == 8
        migrator.submit(0, loads(2 * transfer, 2 * transfer + 1))
    assert migrator.room(0) == 0 and migrator.room(1) == 8
    release()
    assert migrator.commit_arrived(0, wait=True) and migrator.room(0) == 8
    assert not migrator.commit_arrived(0), "nothing is left"


@pytest.mark.parametrize("size", [1, 3, 5, 7, 8])
def test_padding_rows_of_a_transfer_are_dropped(
    engine: Engine, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fill every slot, in transfers whose buffers have rows to spare, and poison the spare rows."""
    hybrid, store = hybrid_of(engine), hybrid_of(engine).store
    gather = type(store).gather

    def poisoned(self, layer, ids, *, rows=None):  # type: ignore[no-untyped-def]
        buffer = gather(self, layer, ids, rows=rows)
        buffer[len(ids) :] = 255 if buffer.dtype == np.uint8 else np.nan
        return buffer

    monkeypatch.setattr(type(store), "gather", poisoned)
    for layer in range(NUM_LAYERS):
        order = np.random.default_rng(size).permutation(NUM_NEURONS)[:40].tolist()
        for first in range(0, 40, size):
            hybrid.migrator.submit(layer, loads(*order[first : first + size]))
    hybrid.settle()
    assert hybrid.num_resident == 40 * NUM_LAYERS
    got = all_logits(engine, IDS.tolist(), prompt=3)
    assert relative_error(got, forward(open_checkpoint(TINY), IDS[None])[0][2:]) < 2e-5


def test_a_slot_that_changes_hands_on_the_way_holds_its_last_owner(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid = hybrid_of(engine)
    for layer in range(NUM_LAYERS):
        hybrid.migrator.submit(layer, loads(*range(100, 108)))
        hybrid.migrator.submit(layer, loads(*range(108, 116)))
    release = hold_transfers(hybrid.migrator, monkeypatch)
    for layer in range(NUM_LAYERS):
        hybrid.migrator.submit(layer, loads(1, 2, 3))
        hybrid.migrator.submit(layer, evicts(1, 2, 3))
        hybrid.migrator.submit(layer, loads(4, 1, 2))
        hybrid.migrator.submit(layer, evicts(2))
    release()
    hybrid.settle()
    for layer in range(NUM_LAYERS):
        assert np.flatnonzero(hybrid.table.resident(layer)).tolist() == [1, 4, *range(100, 116)]
    got = all_logits(engine, IDS.tolist(), prompt=3)
    assert relative_error(got, forward(open_checkpoint(TINY), IDS[None])[0][2:]) < 2e-5


def test_a_failed_transfer_surfaces_and_frees_its_slots(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid = hybrid_of(engine)

    def broken(*args):  # type: ignore[no-untyped-def]
        raise RuntimeError("the link is broken")

    with monkeypatch.context() as patch:
        patch.setattr(hybrid.migrator, "_send", broken)
        hybrid.migrator.submit(0, loads(5, 6))
        with pytest.raises(RuntimeError, match="the link is broken"):
            hybrid.settle()
    hybrid.settle()
    assert not hybrid.table.resident(0).any(), "what never arrived is not resident"
    assert hybrid.table.free(0) == 40, "slots of a failed transfer are lost for good"


def test_first_residents_are_no_promotions() -> None:
    with tiny_engine(gpu_cache_neurons=16) as engine:
        counts = hybrid_of(engine).migrator.take_counts()
        assert hybrid_of(engine).num_resident == 16 * NUM_LAYERS
        assert counts.promotions == counts.link_bytes == counts.evictions == 0


def test_closing_with_transfers_on_the_way_ends() -> None:
    with tiny_engine(gpu_cache_neurons=16, policy="static") as engine:
        migrator = hybrid_of(engine).migrator
        hybrid_of(engine).table.evict(0, np.arange(16, dtype=np.int32))
        for layer in range(4):
            migrator.submit(0, loads(20 + layer))
        migrator.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("kairox-link") and t.is_alive()]


@given(records=st.integers(0, 200), most=st.sampled_from([1, 5, 8, 16, 64, 100, 200]))
def test_buffers_hold_what_is_sent_with_little_padding(records: int, most: int) -> None:
    lengths = sorted({min(length, most) for length in (8, 16, 32, 64, 128, most)})
    records = min(records, most)
    chosen = buffer_lengths(records, lengths)
    assert set(chosen) <= set(lengths) and sum(chosen[:-1]) < max(records, 1)
    assert 0 <= sum(chosen) - records <= max(lengths[0], records // 8)
    assert len(chosen) <= 4


def test_a_plan_in_several_buffers_puts_every_record_into_its_slot() -> None:
    with tiny_engine(policy="static", gpu_cache_neurons=80, max_moves=80) as engine:
        hybrid = hybrid_of(engine)
        migrator, table = hybrid.migrator, hybrid.table
        outside = np.flatnonzero(~table.resident(0))[:41].astype(np.int32)
        assert len(buffer_lengths(41, migrator._lengths)) == 2
        migrator.submit(0, Plan(outside, np.flatnonzero(table.resident(0))[:41]))
        hybrid.settle()
        assert migrator.take_counts().promotions == 41 and table.resident(0)[outside].all()
        want = all_logits(engine, [40, 61, 7, 99], prompt=2)
    with tiny_engine(policy="static", gpu_cache_neurons=0) as engine:
        got = all_logits(engine, [40, 61, 7, 99], prompt=2)
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("link", [None, "1GB/s,5us"])
@pytest.mark.parametrize("dense_part", DENSE_PARTS)
def test_a_load_costs_the_step_its_commit_and_on_shared_cores_its_transfer(
    dense_part: str, link: str | None
) -> None:
    with tiny_engine(dense_part=dense_part, gpu_cache_neurons=40, emulated_link=link) as engine:
        hybrid = hybrid_of(engine)
        migrator = hybrid.migrator
        costs = hybrid.meter.costs(1, migrator, beside=None)
        assert migrator.commit_ms > 0 and migrator.cost.fixed_ms > 0
        works = dense_part == "host" and link is None
        assert costs.step_ms_fixed == migrator.commit_ms + works * migrator.cost.fixed_ms
        assert costs.step_ms_per_record == works * migrator.cost.ms_per_record
    with tiny_engine(gpu_cache_neurons=0) as engine:
        assert hybrid_of(engine).migrator.commit_ms == 0
