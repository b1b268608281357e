"""How prompts are cut, and that it does not matter: pieces, the last few tokens as steps, any place in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import DENSE_PARTS, VOCAB, hybrid_of, relative_error, tiny_engine

from kairox_jax.engine.prefill import CHUNKS, HOST_CHUNKS, pieces, whole_pieces

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
def test_the_last_tokens_of_a_prompt_may_be_steps(dense_part: str, parallel: int) -> None:
    """Whole prompts and rests of them, with another sequence in the cache that must stay as it is."""
    settings: dict[str, Any] = dict(dense_part=dense_part, gpu_cache_neurons=40, parallel=parallel)
    with tiny_engine(context_length=256, **settings) as engine:
        hybrid, row = hybrid_of(engine), parallel - 1
        in_steps = min(len(IDS), 2 * (parallel if dense_part == "host" else 1))
        for start, end in (
            (0, 1),
            (0, in_steps),
            (0, 16 + in_steps),
            (5, 5 + in_steps),
            (64, 70),
            (100, 130),
        ):
            if start:
                hybrid.prefill(IDS[:start], 0, row)
            x = np.asarray(hybrid.prefill(IDS[start:end], start, row))
            zero = np.zeros_like(x)
            want = hybrid.dense.logits(x, zero, zero)[0].copy()
            step = [np.array([n], np.int32) for n in (9, end, row)]
            want_next = hybrid.step(*step)[0][0].copy()
            if start:
                hybrid.prefill(IDS[:start][::-1].copy(), 0, row)  # nothing of the first run is left
                hybrid.prefill(IDS[:start], 0, row)
            got = hybrid.prefill_logits(IDS[start:end], start, row).copy()
            assert relative_error(got, want) < TOLERANCE
            assert relative_error(hybrid.step(*step)[0][0], want_next) < TOLERANCE


def test_steps_of_a_prompt_are_no_steps_of_a_text() -> None:
    with tiny_engine(gpu_cache_neurons=40, parallel=4) as engine:
        hybrid = hybrid_of(engine)
        before = hybrid.state
        hybrid.prefill_logits(IDS[:7], 0, 2)
        assert hybrid.state is before  # the policy has not been asked
