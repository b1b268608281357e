"""Filters against brute force with exact sums, draws against the distribution they should follow."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kairox_jax.config import GenerationConfig
from kairox_jax.engine.sampling import candidates, make_rng, sample, token_logprobs

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
logits_strategy = hnp.arrays(
    np.float32,
    st.integers(1, 40),
    elements=st.one_of(st.sampled_from([-1.0, 0.0, 1.0, 2.0]), st.floats(-30, 30, width=32)),
)


def brute_force(logits: np.ndarray, config: GenerationConfig) -> tuple[list[int], Fraction]:
    """The kept ids, and how near the nearest decision was (as a share of the total)."""
    order = sorted(range(logits.size), key=lambda i: (-float(logits[i]), i))
    if config.top_k:
        order = order[: config.top_k]
    exact = [Fraction(float(np.exp(float(logits[i]) - float(logits[order[0]])))) for i in order]
    total, reached, nearest, keep = sum(exact), Fraction(0), Fraction(1), len(order)
    if config.top_p < 1:
        for position, weight in enumerate(exact):
            reached += weight
            nearest = min(nearest, abs(reached / total - Fraction(config.top_p)))
            if reached / total >= Fraction(config.top_p):
                keep = position + 1
                break
    kept = [i for i, weight in zip(order[:keep], exact, strict=False) if weight >= Fraction(config.min_p)]
    return kept, nearest


@given(logits_strategy, st.integers(0, 50), st.floats(0.01, 1.0), st.floats(0.0, 1.0))
def test_candidates_equal_brute_force(logits, top_k, top_p, min_p):
    config = GenerationConfig(top_k=top_k, top_p=top_p, min_p=min_p)
    expected, nearest = brute_force(logits, config)
    assume(nearest > Fraction(1, 10**12))
    assert candidates(logits, config).tolist() == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 3, 0, 2]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 0]),
        ({"top_k": 99}, [1, 3, 0, 2]),
        ({"top_p": 0.5}, [1]),
        ({"top_p": 0.51}, [1, 3]),
        ({"top_p": 0.75}, [1, 3]),
        ({"min_p": 0.5}, [1, 3]),
        ({"min_p": 0.25}, [1, 3, 0, 2]),
        ({"min_p": 1.0}, [1]),
        # top-p is taken of what top-k left: 2/3 of it is the best token alone.
        ({"top_k": 2, "top_p": 0.6}, [1]),
    ],
)
def test_known_sets(settings, expected):
    logits = np.array([1.0, 4.0, 1.0, 2.0], np.float64)
    logits = np.log(logits)
    assert candidates(logits, GenerationConfig(**{**OFF, **settings})).tolist() == expected


def test_ties_keep_the_lowest_ids():
    logits = np.zeros(5000, np.float32)
    assert candidates(logits, GenerationConfig(**{**OFF, "top_k": 3})).tolist() == [0, 1, 2]
    assert candidates(logits, GenerationConfig(**{**OFF, "top_p": 0.5})).tolist() == list(range(2500))


@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
@pytest.mark.parametrize(
    "settings", [{"top_p": 0.95}, {"top_p": 0.5}, {"min_p": 0.001}, {"top_p": 0.9, "min_p": 0.05}]
)
def test_large_vocabulary_equals_full_sort(rng, scale, settings):
    """The head that is sorted first must grow where the cut lies behind it."""
    logits = (rng.standard_normal(20_000) * scale).astype(np.float32)
    config = GenerationConfig(**{**OFF, **settings})
    order = np.argsort(-logits, kind="stable")
    probs = np.exp(logits[order].astype(np.float64))
    probs /= probs.sum()
    keep = min(
        np.count_nonzero(np.cumsum(probs) - probs < config.top_p) if config.top_p < 1 else probs.size,
        np.count_nonzero(probs >= config.min_p * probs[0]),
    )
    assert candidates(logits, config).tolist() == order[:keep].tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_draws_follow_the_distribution(temperature, settings):
    logits = np.log(np.array([1, 2, 3, 4, 5, 6, 7, 8], np.float64))
    config = GenerationConfig(temperature=temperature, **{**OFF, **settings})
    kept, _ = brute_force(logits, config)
    expected = np.zeros(logits.size)
    expected[kept] = np.arange(1, 9)[kept] ** (1.0 / temperature)
    expected /= expected.sum()
    rng = make_rng(7)
    draws = 10_000
    counts = np.bincount([sample(logits, config, rng) for _ in range(draws)], minlength=logits.size)
    assert not counts[expected == 0].any()
    used = expected > 0
    chi_square = np.sum((counts[used] - draws * expected[used]) ** 2 / (draws * expected[used]))
    # 99.99 % point of chi-square with up to 7 degrees of freedom is below 30.
    assert chi_square < 30


@given(logits_strategy, st.integers(0, 2**32))
def test_temperature_zero_is_argmax_with_lowest_id(logits, seed):
    config = GenerationConfig(temperature=0.0, top_k=3, top_p=0.1, min_p=0.9)
    best = max(range(logits.size), key=lambda i: (float(logits[i]), -i))
    assert sample(logits, config, make_rng(seed)) == best


@given(logits_strategy, st.integers(0, 9), st.floats(0.01, 1.0), st.floats(0.0, 1.0), st.floats(1e-300, 1e6))
def test_a_sample_is_a_candidate(logits, top_k, top_p, min_p, temperature):
    config = GenerationConfig(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    assert sample(logits, config, make_rng(1)) in candidates(logits, config)


def test_same_seed_same_tokens():
    logits = np.linspace(-2, 2, 1000).astype(np.float32)
    config = GenerationConfig(temperature=0.7, seed=42)

    def run(seed: int) -> list[int]:
        rng = make_rng(seed)
        return [sample(logits, config, rng) for _ in range(64)]

    assert run(42) == run(42)
    assert run(42) != run(43)


def test_draws_are_pinned():
    """PCG64's words for seed 42, by its published recurrence: no NumPy version may change them."""
    state = np.random.PCG64(42).state["state"]
    multiplier, mask = 47026247687942121848144207491837523525, (1 << 128) - 1
    value, increment = state["state"], state["inc"]
    logits = np.zeros(1000, np.float32)
    config = GenerationConfig(temperature=1.0, **OFF)
    rng = make_rng(42)
    for _ in range(20):
        value = (value * multiplier + increment) & mask
        xored, turn = ((value >> 64) ^ value) & (2**64 - 1), value >> 122
        word = ((xored >> turn) | (xored << (64 - turn))) & (2**64 - 1) if turn else xored
        assert sample(logits, config, rng) == (word >> 11) * 1000 // 2**53
    assert [sample(logits, config, make_rng(seed)) for seed in (0, 1, 42)] == [636, 511, 773]


def test_extreme_uniform_draws_stay_in_range():
    class Fixed:
        def __init__(self, word: int) -> None:
            self.bit_generator = self
            self.word = word

        def random_raw(self) -> int:
            return self.word

    logits = np.array([0.0, 0.0, -1e30], np.float32)
    config = GenerationConfig(temperature=1.0, **OFF)
    assert sample(logits, config, Fixed(0)) == 0
    assert sample(logits, config, Fixed(2**64 - 1)) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_are_refused(bad):
    logits = np.zeros(10, np.float32)
    logits[7] = bad
    for temperature in (0.0, 1.0):
        with pytest.raises(FloatingPointError, match="1 of 10 logits are not finite .*token 7"):
            sample(logits, GenerationConfig(temperature=temperature), make_rng(0))
    with pytest.raises(FloatingPointError):
        token_logprobs(logits, 1)


@pytest.mark.parametrize(
    "logits", [np.zeros((1, 4), np.float32), np.zeros(0, np.float32), np.zeros(4, np.int32)]
)
def test_wrong_logits_are_refused(logits):
    with pytest.raises(ValueError, match="one row"):
        sample(logits, GenerationConfig(), make_rng(0))


@given(logits_strategy)
def test_logprobs_are_the_log_softmax(logits):
    ids, logprobs = token_logprobs(logits, logits.size)
    wide = logits.astype(np.longdouble)
    expected = wide - wide.max() - np.log(np.sum(np.exp(wide - wide.max())))
    np.testing.assert_allclose(logprobs, expected[ids].astype(np.float64), rtol=0, atol=1e-12)
    assert ids.tolist() == sorted(range(logits.size), key=lambda i: (-float(logits[i]), i))
    top, _ = token_logprobs(logits, 1)
    assert top[0] == ids[0]


@pytest.mark.parametrize("k", [0, 5, -1])
def test_logprobs_out_of_range(k):
    with pytest.raises(ValueError, match="from 1 to"):
        token_logprobs(np.zeros(4, np.float32), k)
