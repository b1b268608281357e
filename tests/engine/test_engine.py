"""Generation with the whole engine on a tiny model: ends, limits, refusals, repeats, traces, placement."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy_reference import forward
from tiny_model import (
    GREEDY,
    NUM_LAYERS,
    NUM_NEURONS,
    TINY,
    VOCAB,
    Churn,
    Scripted,
    all_logits,
    hybrid_of,
    relative_error,
    tiny_engine,
)

from kairox_jax.config import HOST_ACTIVATIONS, GenerationConfig, PlacementConfig
from kairox_jax.engine import Engine, GenerationResult, opening
from kairox_jax.io import open_checkpoint
from kairox_jax.io.convert import Conversion, convert
from kairox_jax.io.trace import read_trace

CONTEXT = 64
PROMPT = [40, 61, 7, 99, 12]
SAMPLED = GenerationConfig(max_tokens=24, temperature=0.7, seed=42, ignore_eos=True)
MODES = ("dense", "exact")


@pytest.fixture(scope="module")
def engines():  # type: ignore[no-untyped-def]
    """One engine of each mode; ``exact`` moves neurons by the guide."""
    with (
        tiny_engine(mode="dense", context_length=CONTEXT) as dense,
        tiny_engine(policy="guide", gpu_cache_neurons=48, context_length=CONTEXT) as exact,
    ):
        yield {"dense": dense, "exact": exact}


@pytest.fixture(params=MODES)
def engine(request: pytest.FixtureRequest, engines: dict[str, Engine]) -> Engine:
    return engines[request.param]


@pytest.fixture
def exact(engines: dict[str, Engine]) -> Engine:
    return engines["exact"]


@pytest.fixture(scope="module")
def greedy_ids() -> list[int]:
    """Greedy continuation of ``PROMPT`` by NumPy float64 without a cache."""
    checkpoint, ids = open_checkpoint(TINY), list(PROMPT)
    for _ in range(GREEDY.max_tokens):
        ids.append(int(forward(checkpoint, np.array([ids]))[0, -1].argmax()))
    return ids[len(PROMPT) :]


def joined(engine: Engine, prompt: Any, config: GenerationConfig) -> tuple[str, GenerationResult]:
    """Return the streamed text and the result; only the last chunk has one."""
    chunks = list(engine.stream(prompt, config))
    assert [c.result is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].result is not None
    return "".join(c.text for c in chunks), chunks[-1].result


def test_greedy_ids_are_those_of_the_reference(engine: Engine, greedy_ids: list[int]) -> None:
    result = engine.generate(PROMPT, GREEDY)
    assert result.token_ids == greedy_ids and result.finish_reason == "length"
    assert result.prompt_token_ids == PROMPT and result.stats.prompt_tokens == len(PROMPT)
    assert result.stats.generated_tokens == GREEDY.max_tokens == result.stats.decode_steps + 1


@pytest.mark.parametrize("slots", [0, 40, 80, 160])
def test_replay_12_same_greedy_ids_at_any_residency(slots: int, greedy_ids: list[int]) -> None:
    with tiny_engine(gpu_cache_neurons=slots) as engine:
        result = engine.generate(PROMPT, GREEDY)
        assert result.token_ids == greedy_ids and result.stats.resident == slots * NUM_LAYERS
    share = result.stats.hit_rate
    assert share is not None and (share == slots / NUM_NEURONS if slots in (0, 160) else 0 < share < 1)


def test_replay_12_same_greedy_ids_while_neurons_move(greedy_ids: list[int]) -> None:
    with tiny_engine(policy=Churn, gpu_cache_neurons=80) as engine:
        stats = []
        for _ in range(2):
            result = engine.generate(PROMPT, GREEDY)
            assert result.token_ids == greedy_ids
            stats.append(result.stats)
    assert min(stats[1].promotions, stats[1].evictions) > 100


def test_statistics_count_every_eviction_of_the_generation() -> None:
    """Three neurons leave each layer at every step: all of it is in this generation's record."""
    leave = staticmethod(lambda step, layer, active, held: ([], np.flatnonzero(held)[:3]))
    policy = type("Leave", (Scripted,), {"script": leave, "warm_start": True})
    with tiny_engine(policy=policy, gpu_cache_neurons=60) as engine:
        stats = engine.generate(PROMPT, replace(GREEDY, max_tokens=6)).stats
    assert stats.decode_steps == 5 and stats.resident == NUM_LAYERS * (60 - 3 * 5)
    assert stats.evictions == NUM_LAYERS * 3 * 5


def test_statistics_record_is_complete_and_consistent(exact: Engine) -> None:
    record = exact.generate(PROMPT, GREEDY).to_json()
    assert record["active"] == record["hits"] + record["residual"] > 0
    assert record["hit_rate"] == pytest.approx(record["hits"] / record["active"], abs=1e-6)
    assert record["link_bytes"] == record["promotions"] * hybrid_of(exact).store.record_bytes(0)
    assert record["resident"] == hybrid_of(exact).num_resident
    assert record["budget"]["total"] == exact.plan.total_bytes
    assert (record["mode"], record["policy"], record["finish_reason"]) == ("exact", "guide", "length")


def test_dense_by_host_kernels_has_no_slots_in_plan_and_statistics(engines: dict[str, Engine]) -> None:
    dense = engines["dense"]
    record = dense.generate(PROMPT, GREEDY).to_json()
    assert (
        dense.plan.slots_per_layer
        == record["budget"]["slots"]
        == sum(record["placement"]["slots_per_layer"])
        == 0
    )
    assert f"dense: all {NUM_NEURONS} neurons a layer, by host kernels" in dense.describe()


def test_replay_13_the_placement_is_in_the_log_and_in_the_statistics(exact: Engine) -> None:
    assert "48 of 160 neurons a layer in float32 device slots" in exact.describe()
    assert "policy guide" in exact.describe() and "host" in exact.describe()
    assert exact.generate(PROMPT, GREEDY).to_json()["placement"], "the statistics do not say what is where"


@pytest.mark.slow
def test_host_activations_are_used_and_said(tmp_path: Path) -> None:
    folder, ids = tmp_path / "quantised", [5, 9, 40, 3, 77, 12]
    job = Conversion(source=open_checkpoint(TINY), target=folder, quantize="q8_0")
    convert(job, note=lambda line: None, report=lambda done, total: None)
    logits = {}
    for activations in HOST_ACTIVATIONS:
        with tiny_engine(folder, gpu_cache_neurons=0, host_activations=activations) as engine:
            logits[activations] = all_logits(engine, ids, prompt=3)
            assert f"{activations} activations" in engine.describe()
            assert engine.placement()["host_activations"] == activations
    assert 1e-5 < relative_error(logits["int8"], logits["float32"]) < 5e-2
    with pytest.raises(ValueError, match="--host-activations int8 needs --host-callback split, not ffi"):
        PlacementConfig(host_activations="int8", host_callback="ffi")


def test_replay_13_a_number_of_host_threads_is_honoured_or_refused() -> None:
    with pytest.MonkeyPatch.context() as patch:
        checkpoint = open_checkpoint(TINY)
        patch.setattr(opening, "open_checkpoint", lambda name: checkpoint)
        patch.setattr(type(checkpoint), "tokenizer", lambda self: None)
        try:
            with Engine(TINY, threads=1, context_length=CONTEXT) as engine:
                assert engine.threads == 1
        except ValueError as error:
            assert "threads" in str(error)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_no_token_and_one_token(engine: Engine, greedy_ids: list[int], max_tokens: int) -> None:
    text, result = joined(engine, PROMPT, replace(GREEDY, max_tokens=max_tokens))
    assert result.token_ids == greedy_ids[:max_tokens] and result.text == text and len(text) == max_tokens
    assert result.finish_reason == "length" and result.stats.decode_steps == 0
    assert result.stats.generated_tokens == max_tokens and result.stats.hit_rate is None
    assert result.stats.decode_tokens_per_s is None and "0.0 tokens/s" not in result.stats.line()


@pytest.mark.parametrize("slots", [0, 40])
def test_the_last_line_says_what_ran_where(slots: int) -> None:
    with tiny_engine(gpu_cache_neurons=slots) as engine:
        line = engine.generate(PROMPT, GREEDY).stats.line()
    if slots:
        assert "% on the device, " in line and " | moved " in line and "link " in line
    else:
        assert " | active neurons: all on the host | ms a token: attention " in line and "device" not in line


def test_replay_22_the_same_seed_gives_the_same_text(engine: Engine) -> None:
    first, second = (engine.generate(PROMPT, SAMPLED) for _ in range(2))
    assert first.token_ids == second.token_ids and first.text == second.text
    others = {tuple(engine.generate(PROMPT, replace(SAMPLED, seed=s)).token_ids) for s in range(4)}
    assert len(others) > 1, "the seed has no effect"


def test_replay_22_sampling_does_not_depend_on_the_mode(engines: dict[str, Engine]) -> None:
    assert len({tuple(engines[mode].generate(PROMPT, SAMPLED).token_ids) for mode in MODES}) == 1


@pytest.mark.parametrize("mode", MODES)
def test_replay_22_eight_greedy_requests_at_once_are_identical(mode: str, greedy_ids: list[int]) -> None:
    slots = {} if mode == "dense" else {"gpu_cache_neurons": 48}
    with tiny_engine(mode=mode, policy="guide", **slots) as engine, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: engine.generate(PROMPT, GREEDY).token_ids, range(8)))
    assert results == [greedy_ids] * 8


def test_a_second_stream_while_one_is_open_is_refused_or_right(exact: Engine, greedy_ids: list[int]) -> None:
    stream = exact.stream(PROMPT, GREEDY)
    ids = [next(stream).token_id for _ in range(4)]
    try:
        exact.generate([77, 78, 79, 80, 81, 82, 83], GREEDY)
    except (ValueError, RuntimeError):
        pass
    ids += [chunk.token_id for chunk in stream if chunk.token_id is not None]
    assert ids == greedy_ids


def test_an_abandoned_stream_leaves_the_next_request_right(exact: Engine, greedy_ids: list[int]) -> None:
    for reuse in (False, True):
        stream: Any = exact.stream([5, 6, *PROMPT], GREEDY)
        next(stream)
        next(stream)
        stream.close()
        assert exact.generate(PROMPT, GREEDY, reuse=reuse).token_ids == greedy_ids


def test_replay_18_a_prompt_as_long_as_the_context(engine: Engine, greedy_ids: list[int]) -> None:
    for length in (CONTEXT, CONTEXT + 1, 3 * CONTEXT):
        with pytest.raises(ValueError, match=f"{length} tokens.*{CONTEXT}.*--ctx-size") as error:
            engine.generate([7] * length, GREEDY)
        assert "\n" not in str(error.value)
    assert engine.generate(PROMPT, GREEDY).token_ids == greedy_ids


def test_a_generation_that_reaches_the_context_ends_with_length(engine: Engine) -> None:
    for length in (CONTEXT - 1, CONTEXT - 10, 10):
        result = engine.generate([7] * length, replace(GREEDY, max_tokens=1000))
        assert len(result.token_ids) == CONTEXT - length and result.finish_reason == "length"


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(engine: Engine, prompt: Any) -> None:
    with pytest.raises(ValueError, match="no tokens: give at least one"):
        engine.generate(prompt, GREEDY)


@pytest.mark.parametrize("token", [-1, VOCAB, 10**9])
def test_token_ids_out_of_range_are_refused(engine: Engine, token: int) -> None:
    with pytest.raises(ValueError, match=f"{token} is outside the vocabulary 0..{VOCAB - 1}"):
        engine.generate([5, token, 6], GREEDY)


def test_what_is_wrong_with_a_prompt_is_said_before_the_first_chunk(engine: Engine) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        engine.stream([], GREEDY)  # not iterated


def test_a_text_is_encoded(engine: Engine) -> None:
    assert engine.generate("(=|", GREEDY).token_ids == engine.generate([40, 61, 124], GREEDY).token_ids


def test_end_of_sequence_stops_and_is_not_part_of_the_text(
    engine: Engine, greedy_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = next(i for i in range(1, len(greedy_ids)) if greedy_ids[i] not in greedy_ids[:i])
    monkeypatch.setattr(engine.tokenizer, "eos_ids", frozenset({greedy_ids[at]}))
    result = engine.generate(PROMPT, replace(GREEDY, ignore_eos=False))
    assert result.token_ids == greedy_ids[:at] and result.finish_reason == "stop"
    assert engine.generate(PROMPT, GREEDY).token_ids == greedy_ids, "ignore_eos"


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_replay_17_stop_texts_over_token_borders(engine: Engine, length: int) -> None:
    whole = engine.generate(PROMPT, SAMPLED).text
    for first in (0, 3, len(whole) - length):
        stop = whole[first : first + length]
        near = stop[:-1] + "~"  # begins alike and never comes
        assert near not in whole
        text, result = joined(engine, PROMPT, replace(SAMPLED, stop=(near, stop)))
        assert text == result.text == whole[: whole.index(stop)] and result.finish_reason == "stop"
        assert len(result.token_ids) == whole.index(stop) + length
    text, result = joined(engine, PROMPT, replace(SAMPLED, stop=("~" + whole[:4],)))
    assert text == result.text == whole and result.finish_reason == "length"


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_replay_16_an_emoji_over_four_tokens_is_whole_or_absent(
    engine: Engine, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = "a\U0001f642b\U0001f680\u00e9".encode()
    coming = iter([bytes([byte]) for byte in raw])
    monkeypatch.setattr(engine.tokenizer, "token_bytes", lambda token: next(coming))
    chunks = [chunk.text for chunk in engine.stream(PROMPT, replace(GREEDY, max_tokens=max_tokens))]
    assert "".join(chunks) == raw[:max_tokens].decode(errors="ignore")
    assert not any("\ufffd" in text for text in chunks)


def test_held_back_text_comes_at_the_end(engine: Engine) -> None:
    whole = engine.generate(PROMPT, SAMPLED).text
    text, result = joined(engine, PROMPT, replace(SAMPLED, stop=(whole[-3:] + "~",)))
    assert text == result.text == whole


def test_reuse_gives_the_same_text_and_runs_less(engine: Engine, greedy_ids: list[int]) -> None:
    longer = [*PROMPT, *greedy_ids[:6], 50, 51]
    fresh = {n: engine.generate(longer[:n], GREEDY).token_ids for n in (3, 5, 9, len(longer))}
    engine.generate(PROMPT, GREEDY)
    seen = []
    for n in (len(longer), 9, len(longer), 3, 5):
        result = engine.generate(longer[:n], GREEDY, reuse=True)
        assert result.token_ids == fresh[n]
        seen.append(result.stats.reused_tokens)
    assert seen[0] == len(PROMPT) + 6 and all(start > 0 for start in seen[:4])
    assert seen[4] == 0  # three tokens of five are not worth it


def test_trace_has_the_counts_of_the_statistics(exact: Engine, tmp_path: Path) -> None:
    result = exact.generate(PROMPT, GREEDY, trace=tmp_path / "run.npz")
    trace = read_trace(tmp_path / "run.npz")
    assert (trace.num_steps, trace.num_layers, trace.num_neurons) == (
        result.stats.decode_steps,
        NUM_LAYERS,
        NUM_NEURONS,
    )
    active = sum(int(trace.active(step).sum()) for step in range(trace.num_steps))
    assert active == result.stats.hits + result.stats.residual
    assert trace.token_ids is not None and trace.token_ids.tolist() == result.token_ids[:-1]


def test_trace_of_a_generation_without_a_step_does_not_lose_the_text(
    exact: Engine, tmp_path: Path, greedy_ids: list[int]
) -> None:
    """One token comes from the prefill; no step is recorded, which the caller could not know before."""
    result = exact.generate(PROMPT, replace(GREEDY, max_tokens=1), trace=tmp_path / "run.npz")
    assert result.token_ids == greedy_ids[:1]


def test_trace_needs_a_mode_that_knows_the_active_neurons(engines: dict[str, Engine]) -> None:
    with pytest.raises(ValueError, match="--trace-out.*--mode dense.*use exact"):
        engines["dense"].generate(PROMPT, GREEDY, trace="run.npz")


def test_a_failed_transfer_surfaces_and_the_next_request_works(greedy_ids: list[int]) -> None:
    with tiny_engine(policy=Churn, gpu_cache_neurons=80) as engine:

        def broken(*args: Any) -> None:
            raise RuntimeError("the link is broken")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hybrid_of(engine).migrator, "_send", broken)
            with pytest.raises(RuntimeError, match="the link is broken"):
                engine.generate(PROMPT, GREEDY)
                hybrid_of(engine).settle()
            for layer in range(NUM_LAYERS):  # failures that are still on the way, or not begun
                while hybrid_of(engine).migrator._pending[layer]:
                    with pytest.raises(RuntimeError, match="the link is broken"):
                        hybrid_of(engine).migrator.commit_arrived(layer, wait=True)
        assert engine.generate(PROMPT, GREEDY).token_ids == greedy_ids


@pytest.mark.parametrize("mode", MODES)
def test_use_after_close_is_refused_in_words(mode: str) -> None:
    with tiny_engine(mode=mode) as engine:
        engine.generate(PROMPT, replace(GREEDY, max_tokens=1))
        engine.close()
        engine.close()
        with pytest.raises((ValueError, RuntimeError), match="closed"):
            engine.generate(PROMPT, GREEDY)


def test_replay_11_no_profile_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kairox"), tiny_engine(gpu_cache_neurons=4) as engine:
        assert np.flatnonzero(hybrid_of(engine).table.resident(0)).tolist() == [0, 1, 2, 3]
    assert len([r for r in caplog.records if "no activation profile" in r.message]) == 1
