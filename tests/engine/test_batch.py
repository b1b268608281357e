"""Sequences that share a step get what each would get alone: tokens, text, cache rows, errors, ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tiny_model import DENSE_PARTS, VOCAB, Churn, hybrid_of, relative_error, tiny_engine

from kairox_jax.config import GenerationConfig
from kairox_jax.engine import Engine
from kairox_jax.engine.batch import Running
from kairox_jax.engine.results import GenerationResult
from kairox_jax.engine.rows import CacheRows

TOLERANCE = 1e-5  # float32 sums in another order
LENGTHS = (3, 17, 5, 9, 1)


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, VOCAB, LENGTHS[i % len(LENGTHS)]).tolist() for i in range(count)]


def greedy(max_tokens: int) -> GenerationConfig:
    return GenerationConfig(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def run_all(engine: Engine, wanted: list[tuple[list[int], GenerationConfig]]) -> list[GenerationResult]:
    """Serve requests with as many rows as there are: each joins as soon as one is free."""
    waiting, order, done = list(enumerate(wanted)), dict[int, Running](), dict[int, GenerationResult]()
    while waiting or engine.batch.running:
        while waiting and engine.batch.rows.num_free:
            index, (ids, config) = waiting.pop(0)
            order[index] = engine.begin(ids, config)
        for running, chunk in engine.batch.advance():
            assert not isinstance(chunk, Exception)
            if chunk.result is not None:
                done[next(i for i, each in order.items() if each is running)] = chunk.result
    return [done[index] for index in range(len(wanted))]


@contextmanager
def batch_engine(**settings: Any) -> Iterator[Engine]:
    with tiny_engine(**settings) as engine:
        yield engine


@pytest.mark.parametrize(("policy", "dense_part"), [("guide", "device"), (Churn, "host")])
def test_each_sequence_gets_its_own_tokens(policy: Any, dense_part: str) -> None:
    wanted = [(ids, greedy(4 + 3 * i)) for i, ids in enumerate(prompts(5))]
    with batch_engine(dense_part=dense_part, policy=policy, gpu_cache_neurons=60) as engine:
        alone = [engine.generate(ids, config) for ids, config in wanted]
    with batch_engine(dense_part=dense_part, policy=policy, gpu_cache_neurons=60, parallel=3) as engine:
        together = run_all(engine, wanted)
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert [each.text for each in together] == [each.text for each in alone]
    assert [each.finish_reason for each in together] == ["length"] * 5


def test_others_decode_in_the_pieces_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens as alone, one from each piece, and the short end of a prompt is run as a step's."""
    rng = np.random.default_rng(8)
    wanted = [
        (rng.integers(3, VOCAB, n).tolist(), greedy(m)) for n, m in ((9, 30), (4, 12), (120, 5), (61, 6))
    ]
    with batch_engine(gpu_cache_neurons=0, context_length=256) as engine:
        alone = [engine.generate(ids, config) for ids, config in wanted]
    with batch_engine(gpu_cache_neurons=0, context_length=256, parallel=4) as engine:
        hybrid, passes = hybrid_of(engine), list[tuple[str, list[int]]]()
        assert hybrid.mixes

        def noted(name: str) -> None:
            run = getattr(hybrid, name)

            def noting(pieces: Any) -> Any:
                passes.append((name, [len(piece.ids) for piece in pieces]))
                return run(pieces)

            monkeypatch.setattr(hybrid, name, noting)

        noted("prefill_together")
        noted("run_few")
        running = [engine.begin(*wanted[i]) for i in (0, 1)]
        list(engine.batch.advance())
        list(engine.batch.advance())
        running += [engine.begin(*wanted[i]) for i in (2, 3)]
        while engine.batch.running:
            list(engine.batch.advance())
    results = [each.result for each in running if each.result is not None]
    assert [each.token_ids for each in results] == [each.token_ids for each in alone]
    # 120 and 61 tokens beside two, then three that decode.
    assert passes[2:] == [("prefill_together", sizes) for sizes in ([62, 1, 1], [58, 4, 1, 1], [57, 1, 1, 1])]
    assert [each.stats.beside_prompts for each in results] == [3, 3, 1, 0]
    assert all(
        each.stats.decode_steps + each.stats.beside_prompts == len(each.token_ids) - 1 for each in results
    )
    assert all(0 < each.stats.decode_tokens_per_s < 1e6 for each in results)  # type: ignore[operator]


def test_what_must_not_depend_on_company_decodes_in_steps() -> None:
    """Rounded inputs, which prompts do not have, and neurons in slots, whose use policies count."""
    for settings in ({"gpu_cache_neurons": 40}, {"gpu_cache_neurons": 0, "host_activations": "int8"}):
        with batch_engine(parallel=2, **settings) as engine:
            assert not hybrid_of(engine).mixes


@pytest.mark.parametrize("dense_part", DENSE_PARTS)
def test_rows_of_a_step_may_be_any(dense_part: str) -> None:
    ids = prompts(3)
    with batch_engine(dense_part=dense_part, gpu_cache_neurons=40, parallel=4) as engine:
        hybrid = hybrid_of(engine)
        want = []
        for tokens in ids:
            hybrid.prefill_logits(np.array(tokens, np.int32), 0, 0)
            logits, _ = hybrid.step(*(np.array([n], np.int32) for n in (7, len(tokens), 0)))
            want.append(logits[0].copy())
        rows = [2, 0, 3]
        for row, tokens in zip(rows, ids, strict=True):
            hybrid.prefill_logits(np.array(tokens, np.int32), 0, row)
        order = [1, 2, 0]
        start = [len(ids[i]) for i in order]
        logits, counts = hybrid.step(
            np.full(3, 7, np.int32), np.array(start, np.int32), np.array([rows[i] for i in order], np.int32)
        )
        for got, i in zip(logits, order, strict=True):
            assert relative_error(got, want[i]) < TOLERANCE
    assert counts.share is not None
    np.testing.assert_array_equal(counts.share > 0, counts.active)
    assert set(np.unique(np.round(counts.share * 3)).tolist()) == {0, 1, 2, 3}


def test_sampling_does_not_depend_on_company() -> None:
    config = GenerationConfig(max_tokens=12, temperature=0.9, seed=42, ignore_eos=True)
    wanted = [(ids, config) for ids in prompts(3)] + [(prompts(1)[0], config)]
    with batch_engine(gpu_cache_neurons=40) as engine:
        alone = [engine.generate(ids, config).token_ids for ids, config in wanted]
    with batch_engine(gpu_cache_neurons=40, parallel=4) as engine:
        together = [each.token_ids for each in run_all(engine, wanted)]
    assert together == alone and together[0] == together[3]


@pytest.mark.parametrize("dense_part", DENSE_PARTS)
def test_a_prompt_begins_where_another_live_one_does(dense_part: str) -> None:
    common = np.random.default_rng(1).integers(3, VOCAB, 30).tolist()
    with batch_engine(dense_part=dense_part, gpu_cache_neurons=40) as engine:
        alone = engine.generate([*common, 9], greedy(6)).token_ids
    with batch_engine(dense_part=dense_part, gpu_cache_neurons=40, parallel=2) as engine:
        first = engine.begin([*common, 5, 6], greedy(20))
        list(engine.batch.advance())
        second = engine.begin([*common, 9], greedy(6))
        assert second.row != first.row and second.stats.reused_tokens == 30
        while second.result is None:
            list(engine.batch.advance())
        assert second.result.token_ids == alone
        third = engine.begin([*common, 9], greedy(6))
        assert third.stats.reused_tokens == 30 and third.row == second.row


def test_cancelling_one_leaves_the_others_alone() -> None:
    ids = prompts(2)
    with batch_engine(gpu_cache_neurons=40) as engine:
        alone = engine.generate(ids[1], greedy(10)).token_ids
    with batch_engine(gpu_cache_neurons=40, parallel=2) as engine:
        gone, stays = engine.begin(ids[0], greedy(10)), engine.begin(ids[1], greedy(10))
        for _ in range(4):
            list(engine.batch.advance())
        last = engine.batch.cancel(gone)
        assert last.result is not None and last.result.finish_reason == "cancelled"
        assert engine.batch.rows.num_free == 1
        while stays.result is None:
            list(engine.batch.advance())
        assert stays.result.token_ids == alone


def test_an_error_of_the_model_ends_all_and_leaves_clean_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompts(2)
    with batch_engine(gpu_cache_neurons=40, parallel=2) as engine:
        alone = engine.generate(ids[0], greedy(5)).token_ids
        for each in ids:
            engine.begin(each, greedy(5))
        list(engine.batch.advance())
        with monkeypatch.context() as patch:
            patch.setattr(hybrid_of(engine).dense, "front", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                for _ in range(3):
                    list(engine.batch.advance())
        assert not engine.batch.running and engine.batch.rows.num_free == 2
        again = engine.begin(ids[0], greedy(5))
        assert again.stats.reused_tokens == 0
        while again.result is None:
            list(engine.batch.advance())
        assert again.result.token_ids == alone


def test_an_error_of_one_sequence_ends_that_one_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompts(2)
    with batch_engine(gpu_cache_neurons=40, parallel=2) as engine:
        alone = engine.generate(ids[1], greedy(5)).token_ids
        bad, good = engine.begin(ids[0], greedy(5)), engine.begin(ids[1], greedy(5))

        def fail(logits: np.ndarray) -> None:
            raise FloatingPointError("logits are NaN")

        monkeypatch.setattr(bad.sequence, "feed", fail)
        errors = []
        while good.result is None:
            errors += [each for each, chunk in engine.batch.advance() if isinstance(chunk, Exception)]
        assert errors == [bad] and good.result.token_ids == alone


def test_more_sequences_than_rows_are_refused() -> None:
    with batch_engine(gpu_cache_neurons=40, parallel=2) as engine:
        for ids in prompts(2):
            engine.begin(ids, greedy(5))
        with pytest.raises(ValueError, match="every row of the cache is in use"):
            engine.begin(prompts(1)[0], greedy(5))
    with pytest.raises(ValueError, match="--parallel 9: choose 1 to 8"):
        Engine("smollm2-135m", parallel=9)


def test_a_first_word_in_common_is_not_reused() -> None:
    """A prompt that is cut elsewhere gets other roundings; for a few tokens it should not."""
    held = list(range(20))
    for prompt, start in (
        ([*held[:7], *[99] * 12], 0),
        ([*held[:8], *[99] * 12], 8),
        ([*held[:4], 99], 4),
        ([*held[:4], 98, 97], 0),
    ):
        rows = CacheRows(1)
        first = rows.take(held, reuse=True)
        rows.put(first.row, 0, held)
        rows.free(first.row)
        assert rows.take(prompt, reuse=True).start == start
