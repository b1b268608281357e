"""The link: timing of the emulated one, and the real engine behind slow, fast and stalled links."""

import threading
import time
from typing import Any

import numpy as np
import pytest
from tiny_model import (
    GREEDY,
    NUM_LAYERS,
    NUM_NEURONS,
    Churn,
    Scripted,
    hybrid_of,
    run_step,
    tiny_engine,
)

from kairox_jax.balancing import POLICIES
from kairox_jax.cli import main
from kairox_jax.config import PlacementConfig, parse_link
from kairox_jax.engine.link import EmulatedLink, Link, LinkClosed, LinkCost, make_link

PROMPT = [40, 61, 7, 99, 12]
# A record of the tiny model has 768 bytes; a step takes about a millisecond.
REGIMES = {"link-bound": "300KB/s,2ms", "balanced": "20MB/s,200us", "cpu-bound": "100GB/s"}
POLICIES_HERE = [*sorted(set(POLICIES) - {"oracle"}), Churn]  # oracle needs the future


def buffer(num_bytes: int) -> Any:
    return lambda: np.arange(num_bytes, dtype=np.uint8).reshape(1, -1)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("3.3GB/s,20us", (3.3e9, 20e-6)),
        ("800MB/s", (8e8, 0.0)),
        (" 1GiB/s , 1.5 ms", (2.0**30, 1.5e-3)),
        ("64k/s,0us", (64e3, 0.0)),
        ("2e9/s,1s", (2e9, 1.0)),
    ],
)
def test_links_are_parsed(text: str, want: tuple[float, float]) -> None:
    assert parse_link(text) == pytest.approx(want)
    assert PlacementConfig(emulated_link=text).emulated_link == text


@pytest.mark.parametrize(
    "text", ["", "fast", "3GB", "GB/s", "0/s", "-1GB/s", "3GB/s,", "3GB/s,20", "3GB/s,-1us", "3GB/s,1us,1us"]
)
def test_nonsense_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"(link|size) ") as error:
        PlacementConfig(emulated_link=text)
    assert "\n" not in str(error.value)


def test_a_latency_beyond_any_link_is_refused() -> None:
    with pytest.raises(ValueError, match="no link"):
        parse_link("1GB/s,11s")


def test_the_machines_own_link_delivers_what_it_is_given() -> None:
    link = make_link(None)
    records, ms = link.send(buffer(100))
    np.testing.assert_array_equal(np.asarray(records), buffer(100)())
    assert type(link) is Link and 0 < ms < 5e3


@pytest.mark.parametrize(("num_bytes", "least_s"), [(20_000, 0.03), (100_000, 0.11), (0, 0.01)])
def test_nothing_arrives_before_latency_and_bandwidth_allow(num_bytes: int, least_s: float) -> None:
    link = EmulatedLink(1e6, 0.01)
    begin = time.perf_counter()
    records, ms = link.send(buffer(num_bytes))
    took = time.perf_counter() - begin
    assert took >= least_s and took >= ms / 1e3 >= least_s
    assert took < least_s + 2, "the link waits for something else"
    np.testing.assert_array_equal(np.asarray(records), buffer(num_bytes)())


def test_a_stall_holds_what_is_on_its_way_and_what_follows() -> None:
    link, arrived = EmulatedLink(1e6, 0.02), []

    def send_two() -> None:
        for _ in range(2):
            link.send(buffer(10))
            arrived.append(time.perf_counter())

    worker = threading.Thread(target=send_two)
    worker.start()
    time.sleep(0.005)
    begin = time.perf_counter()
    link.stall(0.2)
    worker.join(10)
    assert arrived[0] - begin >= 0.2 and arrived[1] - arrived[0] >= 0.02


def test_closing_abandons_a_transfer() -> None:
    link = EmulatedLink(1.0, 0.0)
    closer = threading.Timer(0.05, link.close)
    closer.start()
    with pytest.raises(LinkClosed):
        link.send(buffer(200))
    closer.join()
    with pytest.raises(LinkClosed):
        link.send(buffer(200))


def test_the_cost_of_a_transfer_is_the_line_that_numpy_fits(rng: np.random.Generator) -> None:
    sizes = rng.integers(1, 65, 12)
    times = 0.5 + 0.02 * sizes + rng.normal(0, 0.01, 12)
    cost = LinkCost([(int(n), float(ms)) for n, ms in zip(sizes, times, strict=True)])
    slope, fixed = np.polyfit(sizes, times, 1)
    assert (cost.ms_per_record, cost.fixed_ms) == pytest.approx((slope, fixed))


def test_the_cost_follows_a_link_that_slows_down_but_no_single_outlier() -> None:
    cost = LinkCost([(8, 0.5 + 8 * 0.01), (64, 0.5 + 64 * 0.01)])
    cost.add(32, 1e6)
    assert cost.fixed_ms + 32 * cost.ms_per_record < 4 * 0.82
    for n in (8, 16, 32, 64) * 100:
        cost.add(n, 2.0 + n * 0.1)
    assert cost.ms_per_record == pytest.approx(0.1, rel=0.25) and cost.fixed_ms == pytest.approx(
        2.0, rel=0.25
    )


def test_small_transfers_alone_do_not_make_records_dear() -> None:
    """Only single records go for a long time: their time is the fixed part, as the first two sizes said."""
    cost = LinkCost([(8, 0.5 + 8 * 0.01), (64, 0.5 + 64 * 0.01)])
    for _ in range(300):
        cost.add(1, 0.51)
    assert cost.ms_per_record == pytest.approx(0.01, rel=0.1) and cost.fixed_ms == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("points", [[(8, 2.0), (64, 1.0)], [(8, 0.0), (64, 1.0)], [(8, 1.0)], []])
def test_a_cost_is_never_negative(points: list[tuple[int, float]]) -> None:
    cost = LinkCost(points)
    assert cost.ms_per_record >= 0 and cost.fixed_ms >= 0


@pytest.fixture(scope="module")
def greedy_ids() -> list[int]:
    """Greedy tokens where nothing is on the device and nothing moves."""
    with tiny_engine(gpu_cache_neurons=0) as engine:
        return engine.generate(PROMPT, GREEDY).token_ids


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("policy", POLICIES_HERE)
def test_greedy_tokens_are_the_same_under_every_policy(
    policy: type | str, regime: str, greedy_ids: list[int]
) -> None:
    slots = NUM_NEURONS // 2  # so that `layers` can hold one
    with tiny_engine(policy=policy, gpu_cache_neurons=slots, emulated_link=REGIMES[regime]) as engine:
        result = engine.generate(PROMPT, GREEDY)
        assert result.token_ids == greedy_ids
        if policy is Churn:
            again = engine.generate(PROMPT, GREEDY)
            assert again.token_ids == greedy_ids
            promoted = result.stats.promotions + again.stats.promotions
            assert promoted > 100 if regime == "cpu-bound" else promoted >= 0


def test_regimes_differ_in_what_arrives() -> None:
    promoted = {}
    for regime, link in REGIMES.items():
        with tiny_engine(policy=Churn, gpu_cache_neurons=80, emulated_link=link) as engine:
            promoted[regime] = engine.generate(PROMPT, GREEDY).stats.promotions
    assert promoted["link-bound"] < promoted["cpu-bound"] and promoted["link-bound"] < promoted["balanced"]


def slowed(ffn: Any, neuron_s: float) -> Any:
    """Return a layer's host kernel that takes so long for each neuron, by waiting."""

    def run_slowly(h: Any, ids: Any, n: int, *rest: Any, **more: Any) -> None:
        begin = time.perf_counter()
        ffn(h, ids, n, *rest, **more)
        time.sleep(max(0.0, begin + n * neuron_s - time.perf_counter()))

    return run_slowly


def step_times(stall_s: float, steps: int = 30, neuron_s: float = 0.0) -> tuple[list[float], int]:
    """Return the seconds of each step under a policy that moves all the time, and promotions that arrived."""
    with tiny_engine(policy=Churn, gpu_cache_neurons=80, emulated_link="1GB/s,20us") as engine:
        hybrid = hybrid_of(engine)
        hybrid._ffns = [slowed(ffn, neuron_s) for ffn in hybrid._ffns]
        link = hybrid.migrator.link
        assert isinstance(link, EmulatedLink)
        for at in range(4):
            run_step(engine, 40 + at, at)
        if stall_s:
            link.stall(stall_s)
        times, arrived = [], 0
        for at in range(4, 4 + steps):
            begin = time.perf_counter()
            counts = run_step(engine, 40 + at, at)[1]
            times.append(time.perf_counter() - begin)
            arrived += counts.moves.promotions
        begin = time.perf_counter()
    assert time.perf_counter() - begin < 2, "closing waited for the stalled link"
    return times, arrived


def test_a_stalled_link_delays_no_token() -> None:
    """A 10 s stall; what is on the way when it begins may still be committed, and then nothing."""
    usual, moved = step_times(0.0)
    stalled, stuck = step_times(10.0)
    assert moved > stuck
    assert np.median(stalled) < 3 * np.median(usual) + 2e-3
    assert max(stalled) < 2, "a step waited for the link"


def test_a_stall_costs_a_token_no_more_than_its_layers_on_the_host() -> None:
    """The host takes 100 us a neuron here, so a layer that is computed there alone takes 16 ms; the stall 10 s."""
    usual, moved = step_times(0.0, steps=16, neuron_s=1e-4)
    stalled, stuck = step_times(10.0, steps=16, neuron_s=1e-4)
    assert moved > stuck
    assert np.median(stalled) - np.median(usual) < NUM_LAYERS * NUM_NEURONS * 1e-4
    assert np.median(stalled) > NUM_LAYERS * (NUM_NEURONS - 80) * 1e-4, "the host was not slowed"


def test_closing_during_a_stall_ends_and_leaves_no_thread() -> None:
    before = {thread.ident for thread in threading.enumerate()}
    with tiny_engine(policy=Churn, gpu_cache_neurons=80, emulated_link="1GB/s,20us") as engine:
        link = hybrid_of(engine).migrator.link
        assert isinstance(link, EmulatedLink)
        link.stall(60.0)
        for at in range(6):
            run_step(engine, 40, at)
        begin = time.monotonic()
        engine.close()
        took = time.monotonic() - begin
    assert took < 1
    left = [t for t in threading.enumerate() if t.ident not in before and t.name.startswith("kairox-link")]
    assert not left


def test_after_a_stall_the_engine_goes_on_and_slots_are_kept() -> None:
    with tiny_engine(policy=Churn, gpu_cache_neurons=80, emulated_link="1GB/s,20us") as engine:
        hybrid, link = hybrid_of(engine), hybrid_of(engine).migrator.link
        assert isinstance(link, EmulatedLink)
        link.stall(0.3)
        for at in range(6):
            run_step(engine, 40 + at, at)
        hybrid.settle()
        moved = hybrid.migrator.take_counts().promotions
        assert moved > 0 and hybrid.migrator.backlog_ms == 0
        assert all(hybrid.table.free(i) + hybrid.table.held(i).sum() == 80 for i in range(NUM_LAYERS))


def test_a_burst_of_cold_neurons_is_computed_on_the_host_until_it_has_arrived() -> None:
    """A text that wakes other neurons: the link cannot bring them at once; the counts say where they ran."""
    busy = staticmethod(
        lambda step, layer, active, held: (
            np.flatnonzero((active > 0) & ~held)[: 160 - int(held.sum())] if step == 2 else [],
            [],
        )
    )
    policy = type("Burst", (Scripted,), {"script": busy})
    with tiny_engine(
        policy=policy, gpu_cache_neurons=160, max_moves=160, emulated_link="1GB/s,100ms"
    ) as engine:
        hybrid = hybrid_of(engine)
        hits = []
        for at in range(6):
            counts = run_step(engine, 40, at)[1]
            hits.append(int(counts.hits.sum()))
            assert int(counts.hits.sum() + counts.residual.sum()) == int(counts.active.sum())
        burst = sum(len(a.neurons) for pending in hybrid.migrator._pending for a in pending)
        assert hits == [0] * 6 and burst > 10, "a step used what had not arrived, or nothing was sent"
        hybrid.settle()
        assert hybrid.num_resident == burst
        assert run_step(engine, 40, 6)[1].hits.sum() > 0


def test_the_link_is_said_at_the_start_and_in_the_statistics() -> None:
    with tiny_engine(gpu_cache_neurons=8, emulated_link="3.3GB/s,20us") as engine:
        assert "link: emulated, 3.3 GB/s after 20 us" in engine.describe()
        assert engine.placement()["link"] == "emulated, 3.3 GB/s after 20 us"
    with tiny_engine(gpu_cache_neurons=8) as engine:
        assert "link" not in engine.describe() and engine.placement()["link"] == "device"


def test_a_wrong_link_on_the_command_line_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "hi", "--emulated-link", "fast"]) != 0
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "3.3GB/s,20us" in err


def test_dense_mode_refuses_a_link() -> None:
    with pytest.raises(ValueError, match="--emulated-link"), tiny_engine(mode="dense", emulated_link="1GB/s"):
        pass
