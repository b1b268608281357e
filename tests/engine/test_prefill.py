"""How prompts are cut, and that it does not matter: pieces, a few tokens as a step, any place in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import DENSE_PARTS, GREEDY, MODELS, VOCAB, hybrid_of, relative_error, tiny_engine

from kairox_jax.balancing import Plan
from kairox_jax.engine.host_prefill import (
    GROUP,
    MOST_IN_BATCH,
    MOST_MIXED,
    MOST_TOGETHER,
    MOST_TOKENS,
    HostPrefill,
)
from kairox_jax.engine.hybrid import Hybrid
from kairox_jax.engine.prefill import CHUNKS, MAX_TOGETHER, Piece, pieces, share_padded

TOLERANCE = 1e-5  # float32 sums in another order
IDS = np.random.default_rng(3).integers(3, VOCAB, 200).astype(np.int32)


def run(hybrid: Hybrid, start: int, end: int, row: int) -> np.ndarray:
    """Run tokens as a prompt's, in pieces and never as a step; return the residual stream after the last, [1, D]."""
    done, x = start, np.empty((0, 0))
    while done < end:
        (tokens,) = hybrid.share([end - done])
        x = np.array(hybrid.prefill.together([Piece(IDS[done : done + tokens], done, row)]))
        done += tokens
    return x


@given(st.integers(0, 5000), st.integers(1, 5000))
def test_pieces_cover_a_prompt_in_order(start: int, length: int) -> None:
    made = list(pieces(start, length, CHUNKS))
    assert [first for first, _, _ in made] == [start, *(last for _, last, _ in made[:-1])]
    assert made[-1][1] == start + length
    assert all(size in CHUNKS and 0 < last - first <= size for first, last, size in made)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_padded_pieces_that_run_together_are_alike(left: list[int]) -> None:
    shares = share_padded(left, CHUNKS)
    sizes = [min(size for size in CHUNKS if size >= tokens) for tokens in shares if tokens]
    assert shares[0] > 0 and all(0 <= tokens <= rest for tokens, rest in zip(shares, left, strict=True))
    assert set(sizes) <= {sizes[0], sizes[0] // 2} and len(sizes) in (1, 2, 4)
    assert len(sizes) == 1 or sizes[0] * len(sizes) <= MAX_TOGETHER


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8), st.integers(1, 8))
def test_a_piece_on_the_host_is_filled_with_several_prompts(left: list[int], batch: int) -> None:
    class Dense:
        pass

    Dense.batch = batch  # type: ignore[attr-defined]
    shares = HostPrefill(Dense(), ffns=()).share(left)  # type: ignore[arg-type]
    most = MOST_TOKENS if batch == 1 else MOST_IN_BATCH
    assert shares[0] > 0 and sum(shares) <= MOST_TOGETHER
    for tokens, rest in zip(shares, left, strict=True):
        assert tokens <= min(rest, most) and (tokens in (0, rest) or tokens % GROUP == 0)
    room = MOST_TOGETHER - sum(shares)
    assert all(tokens or min(rest, most) > room for tokens, rest in zip(shares, left, strict=True))


@given(st.lists(st.integers(1, 500), min_size=1, max_size=4), st.integers(1, 4))
def test_a_piece_with_others_tokens_is_short(left: list[int], beside: int) -> None:
    shares = HostPrefill(Any, ffns=()).share(left, beside=beside)  # type: ignore[arg-type]
    room = MOST_MIXED - beside
    assert sum(shares) == min(sum(left), room)
    assert all(0 <= tokens <= rest for tokens, rest in zip(shares, left, strict=True))
    assert shares[0] >= min(left[0], room // 2)


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    share = HostPrefill(Any, ffns=()).share  # type: ignore[arg-type]
    assert share([2000, 60, 10], beside=4) == [30, 20, 10]
    assert share([2000, 7], beside=4) == [53, 7] and share([2000], beside=4) == [60]
    assert share([100, 60, 10], beside=4) == [60, 0, 0] and share([40, 60, 10], beside=4) == [40, 10, 10]


def test_a_long_prompt_is_cut_into_equal_pieces() -> None:
    class Dense:
        batch = 1

    prefill = HostPrefill(Dense(), ffns=())  # type: ignore[arg-type]
    assert [prefill.share([n])[0] for n in (7, 256, 257, 129, 600)] == [7, 256, 160, 129, 224]


@pytest.mark.parametrize("dense_part", DENSE_PARTS)
@pytest.mark.parametrize("parallel", [1, 4])
def test_a_prompt_may_be_cut_anywhere(dense_part: str, parallel: int) -> None:
    """In pieces or as the tokens of a step, from any position on, in any row: the same logits, the same cache."""
    settings: dict[str, Any] = dict(dense_part=dense_part, gpu_cache_neurons=40, parallel=parallel)
    with tiny_engine(context_length=256, **settings) as engine:
        hybrid, row = hybrid_of(engine), parallel - 1
        few = hybrid.few_tokens
        assert few == {"host": parallel, "device": 1}[dense_part]
        for start, end in ((0, 1), (0, few), (0, 64 + few), (5, 5 + few), (64, 70), (100, 130)):
            step = [np.array([n], np.int32) for n in (9, end, row)]
            x = run(hybrid, 0, end, row)
            want_next = hybrid.step(*step)[0][0].copy()
            want = hybrid.dense.logits(x, np.zeros_like(x), np.zeros_like(x))[0].copy()
            hybrid.prefill.together([Piece(IDS[:99:-1], 0, row)])  # nothing of that is left
            run(hybrid, 0, start, row)
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
                hybrid.prefill.together([Piece(IDS[:99:-1], 0, row)])
                run(hybrid, 0, start, row)

        hybrid.prefill.together([Piece(IDS[60:80], 0, 1)])
        before()
        want = [run(hybrid, start, end, row)[0] for start, end, row in cuts]
        want_next = hybrid.step(*steps)[0].copy()
        before()
        got = np.asarray(
            hybrid.prefill.together([Piece(IDS[start:end], start, row) for start, end, row in cuts])
        )
        if dense_part == "host":  # the same bits
            np.testing.assert_array_equal(got, np.stack(want))
        assert relative_error(got, np.stack(want)) < TOLERANCE
        assert relative_error(hybrid.step(*steps)[0], want_next) < TOLERANCE


def test_the_ends_of_prompts_share_steps() -> None:
    cuts = [(0, 3, 2), (40, 46, 0), (7, 8, 3)]  # ten tokens: three steps of four
    with tiny_engine(gpu_cache_neurons=40, parallel=4, context_length=256) as engine:
        hybrid, want = hybrid_of(engine), []
        for start, end, row in cuts:
            run(hybrid, 0, start, row)
            want.append(hybrid.prefill_logits(IDS[start:end], start, row).copy())
        state = hybrid.state
        got = hybrid.run_few([Piece(IDS[start:end], start, row) for start, end, row in cuts])
        assert relative_error(got, np.stack(want)) < TOLERANCE
        assert hybrid.state is state  # no policy has been asked


def test_waiting_prompts_are_taken_in_turn_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [100, 60, 33, 9, 196, 120]
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
    # The short ones fill the first piece; 196 tokens are cut in two.
    assert passes == [[100, 60, 33, 9], [128, 120], [68]]


@pytest.mark.slow  # kernels of a form of their own
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


def test_engines_of_one_process_do_not_share_what_a_prompt_leaves_for_the_ffn() -> None:
    """Another engine's kernels may run between a prompt's attention and its FFN."""
    with tiny_engine(gpu_cache_neurons=0) as one, tiny_engine(gpu_cache_neurons=0) as other:
        denses: list[Any] = [hybrid_of(engine).dense for engine in (one, other)]
        at, row = np.arange(9, dtype=np.int32), np.zeros(9, np.int32)
        ids = [IDS[:9], IDS[20:29]]
        found = []
        for dense, mine in zip(denses, ids, strict=True):
            h = dense.prompt(0, dense.embed(mine[:, None], at)[:, 0], at, row)
            found.append((h, h.copy()))
        for h, copied in found:
            np.testing.assert_array_equal(h, copied)
        assert np.abs(found[0][1] - found[1][1]).max() > 1e-3
