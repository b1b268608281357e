"""Penalties, bias and log-probabilities against NumPy; held-back text; constraints."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import Letters

from kairox_jax.config import GenerationConfig
from kairox_jax.engine.sampling import adjust, token_logprob
from kairox_jax.engine.sequence import Sequence

VOCAB = 90


def one_hot(token: int) -> np.ndarray:
    logits = np.zeros(VOCAB, np.float32)
    logits[token] = 9
    return logits


def tokens_of(text: str) -> list[int]:
    return [ord(char) - 33 for char in text]


def run(text: str, **settings: object) -> tuple[list[str], Sequence, list[list[str]]]:
    """Feed a sequence the tokens of a text until it ends: pieces, the sequence, names of logprobs by feed."""
    config = GenerationConfig(temperature=0, max_tokens=100, logprobs=0, **settings)
    sequence = Sequence([1], config, Letters(), room=100)
    pieces, names = [], []
    for token in tokens_of(text):
        chosen = sequence.feed(one_hot(token))
        assert chosen is not None and chosen[0] == token
        pieces.append(chosen[1])
        names.append([chr(entry.token_id + 33) for entry in sequence.take_logprobs()])
        if sequence.finish_reason:
            break
    return pieces, sequence, names


@given(
    st.integers(0, 2**32 - 1),
    st.dictionaries(st.integers(0, 19), st.integers(1, 5), max_size=6),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.dictionaries(st.integers(0, 19), st.floats(-100, 100), max_size=4),
)
def test_adjust_is_openais_formula(seed, counts, presence, frequency, bias):
    logits = np.random.default_rng(seed).normal(0, 5, 20).astype(np.float32)
    config = GenerationConfig(presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias)
    count = np.zeros(20)
    count[list(counts)] = list(counts.values())
    want = logits.astype(np.float64) - count * frequency - (count > 0) * presence
    for token, value in bias.items():
        want[token] += value
    before = logits.copy()
    np.testing.assert_allclose(adjust(logits, config, counts), want, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(logits, before)


def test_nothing_to_adjust_copies_nothing():
    logits = np.zeros(5, np.float32)
    assert adjust(logits, GenerationConfig(), {1: 3}) is logits


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 50))
def test_token_logprob_is_the_log_softmax(seed, scale):
    logits = (np.random.default_rng(seed).normal(0, scale, 30)).astype(np.float32)
    wide = logits.astype(np.float64)
    want = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    got = [token_logprob(logits, token) for token in range(30)]
    np.testing.assert_allclose(got, want, atol=1e-9)


def test_logprobs_come_with_the_text_and_leave_out_the_stop_text():
    pieces, sequence, names = run("abcxyz", stop=("xyz",))
    assert pieces == ["a", "b", "c", "", "", ""] and sequence.finish_reason == "stop"
    assert names == [["a"], ["b"], ["c"], [], [], []]


def test_a_stop_text_that_does_not_come_gives_its_logprobs_late():
    pieces, _, names = run("axyb", stop=("xyz",))
    assert pieces == ["a", "", "", "xyb"] and names == [["a"], [], [], ["x", "y", "b"]]


def test_what_is_held_back_at_the_limit_comes_at_the_end():
    config = GenerationConfig(temperature=0, max_tokens=2, logprobs=2, stop=("xyz",))
    sequence = Sequence([1], config, Letters(), room=100)
    assert sequence.feed(one_hot(tokens_of("x")[0])) == (tokens_of("x")[0], "")
    sequence.feed(one_hot(tokens_of("y")[0]))
    assert sequence.finish_reason == "length" and sequence.flush() == "xy" and sequence.text == "xy"
    entries = sequence.take_logprobs()
    assert [entry.offset for entry in entries] == [0, 1] and len(entries[0].top) == 2
    assert entries[0].top[0] == (entries[0].token_id, entries[0].logprob)
    with pytest.raises(ValueError, match="has ended"):
        sequence.feed(one_hot(5))


@pytest.mark.parametrize(("ignore", "want"), [(False, None), (True, (2, "#"))])
def test_the_end_token(ignore, want):
    sequence = Sequence([1], GenerationConfig(temperature=0, ignore_eos=ignore), Letters(), room=9)
    assert sequence.feed(one_hot(2)) == want
    assert sequence.finish_reason == (None if ignore else "stop")


def test_no_room_is_an_end_at_once():
    assert Sequence([1], GenerationConfig(max_tokens=0), Letters(), room=9).finish_reason == "length"
    assert Sequence([1], GenerationConfig(), Letters(), room=0).finish_reason == "length"


class OnlyEven:
    """Allows even tokens and ends after two."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def allowed(self) -> np.ndarray:
        return np.arange(VOCAB + 6) % 2 == 0  # longer than the logits, as a padded vocabulary is

    def accept(self, token_id: int) -> None:
        self.taken.append(token_id)

    @property
    def finished(self) -> bool:
        return len(self.taken) == 2


@pytest.mark.parametrize("temperature", [0, 5.0])
def test_a_constraint_is_kept_and_ends_the_text(temperature):
    rule = OnlyEven()
    config = GenerationConfig(temperature=temperature, top_k=0, top_p=1, min_p=0, ignore_eos=True)
    sequence = Sequence([1], config, Letters(), room=50, constraint=rule)
    for _ in range(2):
        assert sequence.finish_reason is None
        sequence.feed(one_hot(33))
    assert sequence.finish_reason == "stop" and all(token % 2 == 0 for token in rule.taken)
    assert temperature or rule.taken == [0, 0]
