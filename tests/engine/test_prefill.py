"""How prompts are cut, and that it does not matter: pieces, the last few tokens as steps, any place in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import DENSE_PARTS, GREEDY, MODELS, VOCAB, hybrid_of, relative_error, tiny_engine

from kairox_jax.balancing import Plan
from kairox_jax.engine.prefill import CHUNKS, HOST_CHUNKS, Piece, pieces, whole_pieces
from kairox_jax.engine.prefill_programs import mix_program

TOLERANCE = 1e-5  # float32 sums in another order
IDS = np.random.default_rng(3).integers(3, VOCAB, 200).astype(np.int32)


@given(st.integers(0, 5000), st.integers(1, 5000), st.sampled_from([CHUNKS, HOST_CHUNKS]))
def test_pieces_cover_a_prompt_in_order(start: int, length: int, sizes: tuple[int, ...]) -> None:
    made = list(pieces(start, length, sizes))
    assert [first for first, _, _ in made] == [start, *(last for _, last, _ in made[:-1])]
    assert made[-1][1] == start + length
    assert all(size in sizes and 0 < last - first <= size for first, last, size in made)


@given(st.integers(1, 5000), st.integers(0, 32), st.sampled_from([CHUNKS, HOST_CHUNKS]))
def test_what_is_left_for_steps_is_little_and_leaves_no_padding(
    length: int, few: int, sizes: tuple[int, ...]
) -> None:
    cut = whole_pieces(length, few, sizes)
    assert 0 <= cut <= length and length - cut <= few
    if cut < length:
        assert all(last - first == size for first, last, size in pieces(0, cut, sizes))
    assert few == 0 or length > few or cut == 0


@pytest.mark.parametrize("dense_part", DENSE_PARTS)
@pytest.mark.parametrize("parallel", [1, 4])
def test_a_prompt_may_be_cut_anywhere(dense_part: str, parallel: int) -> None:
    """In pieces or as the tokens of a step, from any position on, in any row: the same logits, the same cache."""
    settings: dict[str, Any] = dict(dense_part=dense_part, gpu_cache_neurons=40, parallel=parallel)
    with tiny_engine(context_length=256, **settings) as engine:
        hybrid, row = hybrid_of(engine), parallel - 1
        few = hybrid.few_tokens
        assert few == {"host": 2 * parallel, "device": 1}[dense_part]
        for start, end in ((0, 1), (0, few), (0, 64 + few), (5, 5 + few), (64, 70), (100, 130)):
            step = [np.array([n], np.int32) for n in (9, end, row)]
            hybrid.prefill(IDS[:end], 0, row)
            want_next = hybrid.step(*step)[0][0].copy()
            x = np.asarray(hybrid.prefill(IDS[:end], 0, row))
            want = hybrid.dense.logits(x, np.zeros_like(x), np.zeros_like(x))[0].copy()
            hybrid.prefill(IDS[::-1].copy(), 0, row)  # nothing of that is left
            if start:
                hybrid.prefill(IDS[:start], 0, row)
            assert relative_error(hybrid.prefill_logits(IDS[start:end], start, row), want) < TOLERANCE
            assert relative_error(hybrid.step(*step)[0][0], want_next) < TOLERANCE


@pytest.mark.parametrize("dense_part", DENSE_PARTS)
def test_prompts_share_a_piece(dense_part: str) -> None:
    """Of other lengths, at other positions and in any rows; a row that is not among them stays as it is."""
    cuts = [(0, 30, 2), (40, 70, 0), (7, 27, 3)]
    with tiny_engine(dense_part=dense_part, gpu_cache_neurons=40, parallel=4, context_length=256) as engine:
        hybrid = hybrid_of(engine)
        steps = [np.array(values, np.int32) for values in ([9] * 4, [20, 30, 70, 27], [1, 2, 0, 3])]

        def before() -> None:
            for start, _, row in cuts:
                hybrid.prefill(IDS[::-1].copy(), 0, row)
                if start:
                    hybrid.prefill(IDS[:start], 0, row)

        hybrid.prefill(IDS[60:80], 0, 1)
        before()
        want = [np.array(hybrid.prefill(IDS[start:end], start, row))[0] for start, end, row in cuts]
        want_next = hybrid.step(*steps)[0].copy()
        before()
        got = np.asarray(
            hybrid.prefill.together([Piece(IDS[start:end], start, row) for start, end, row in cuts])
        )
        assert relative_error(got, np.stack(want)) < TOLERANCE
        assert relative_error(hybrid.step(*steps)[0], want_next) < TOLERANCE


def test_the_ends_of_prompts_share_steps() -> None:
    cuts = [(0, 3, 2), (40, 46, 0), (7, 8, 3)]  # ten tokens: three steps of four
    with tiny_engine(gpu_cache_neurons=40, parallel=4, context_length=256) as engine:
        hybrid, want = hybrid_of(engine), []
        for start, end, row in cuts:
            if start:
                hybrid.prefill(IDS[:start], 0, row)
            want.append(hybrid.prefill_logits(IDS[start:end], start, row).copy())
        state = hybrid.state
        got = hybrid.run_few([Piece(IDS[start:end], start, row) for start, end, row in cuts])
        assert relative_error(got, np.stack(want)) < TOLERANCE
        assert hybrid.state is state  # no policy has been asked


def test_waiting_prompts_are_taken_in_turn_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [100, 60, 33, 9, 200, 120]
    prompts = [IDS[n % 7 :][:n].tolist() for n in lengths]
    with tiny_engine(gpu_cache_neurons=40, context_length=256) as engine:
        alone = [engine.generate(ids, GREEDY).token_ids for ids in prompts]
    with tiny_engine(gpu_cache_neurons=40, context_length=256, parallel=6) as engine:
        hybrid, passes = hybrid_of(engine), list[list[int]]()
        together = hybrid.prefill.together

        def noted(prompts: Any) -> Any:
            passes.append([len(piece.ids) for piece in prompts])
            return together(prompts)

        monkeypatch.setattr(hybrid.prefill, "together", noted)
        running = [engine.begin(ids, GREEDY) for ids in prompts]
        while any(each.result is None for each in running):
            list(engine.batch.advance())
        assert [each.result.token_ids for each in running if each.result is not None] == alone
    # 33 is a piece of 32 and a token of a step, 9 is no piece at all, 200 is 128, 64 and 8 tokens of a step.
    assert passes == [[100, 60], [32], [128, 120], [64]]


def test_shapes_are_prepared_without_a_trace_in_the_cache() -> None:
    with tiny_engine(gpu_cache_neurons=40, context_length=256, parallel=2) as engine:
        hybrid, step = hybrid_of(engine), [np.array([n], np.int32) for n in (9, 40, 1)]
        hybrid.prefill_logits(IDS[:40], 0, 1)
        want = hybrid.step(*step)[0].copy()
        prepared = 0
        while engine.prepare():
            prepared += 1
        compiled = mix_program._cache_size()  # type: ignore[attr-defined]
        assert prepared == 12  # one prompt or two, of 16, 32, 64 and 128 tokens; one that begins as another
        np.testing.assert_array_equal(hybrid.step(*step)[0], want)
        pieces = [Piece(IDS[:60], 0, row) for row in range(2)]
        hybrid.prefill.together(pieces)
        hybrid.prefill.together(pieces[:1])
        hybrid.prefill.together([Piece(IDS[20:60], 20, 0)])
        assert mix_program._cache_size() == compiled  # type: ignore[attr-defined]


def test_a_prompt_does_not_depend_on_where_the_neurons_are_if_a_threshold_drops_them() -> None:
    """Another rounding would drop others: the same program computes all of a prompt, whatever is reused of it."""
    with tiny_engine(
        MODELS / "prosparse-llama", gpu_cache_neurons=40, context_length=256, parallel=4
    ) as engine:
        hybrid = hybrid_of(engine)
        assert hybrid.few_tokens == 0
        hybrid.prefill_logits(IDS[:49], 0, 1)
        want = hybrid.prefill_logits(IDS[49:50], 49, 1).copy()
        assert hybrid.table.resident(0).any()
        hybrid.migrator.submit(0, Plan(np.empty(0, np.int32), np.flatnonzero(hybrid.table.resident(0))))
        hybrid._refresh(0)
        np.testing.assert_array_equal(hybrid.prefill_logits(IDS[49:50], 49, 1), want)
        together = hybrid.prefill_together([Piece(IDS[:9], 0, 0), Piece(IDS[49:50], 49, 1)])
        assert relative_error(together[1], want) < TOLERANCE
