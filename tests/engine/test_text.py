"""The streamed text equals the text cut in one go, whatever the tokens' borders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kairox_jax.engine.text import TextStream


def stream(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """Push each piece as a token until the stream stops, then flush."""
    text = TextStream(lambda token: pieces[token], stop)
    shown = []
    for token in range(len(pieces)):
        shown.append(text.push(token))
        if text.stopped:
            break
    shown.append(text.flush())
    return shown, text


def one_shot(text: str, stop: tuple[str, ...]) -> str:
    """Read character by character; end where the text so far ends with a stop text, and cut the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(word) for word in stop if text[:end].endswith(word)]
        if lengths:
            return text[: end - max(lengths)]
    return text


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in zip(borders, borders[1:], strict=False)]


def test_emoji_over_several_tokens_is_shown_once_and_whole():
    wave = "👋".encode()
    shown, text = stream([b"hi ", wave[:1], wave[1:3], wave[3:], b"!"])
    assert shown == ["hi ", "", "", "👋", "!", ""]
    assert text.text == "hi 👋!" and not text.stopped


@pytest.mark.parametrize("length", [1, 2, 3])
def test_end_inside_a_character_drops_its_bytes(length):
    shown, _ = stream([b"ok", "👋".encode()[:length]])
    assert "".join(shown) == "ok"


def test_invalid_bytes_become_replacement_once_certain():
    shown, _ = stream([b"a", b"\xf0\x9f", b"b", b"\xff", b"c"])
    assert shown == ["a", "", "\ufffdb", "\ufffd", "c", ""]


def test_replacement_character_in_the_text_itself_is_kept():
    shown, _ = stream(["x\ufffdy".encode()])
    assert "".join(shown) == "x\ufffdy"


def test_stop_over_several_tokens():
    shown, text = stream([b"L M N", b" O", b" P", b" Q R"], ("O P Q",))
    assert "".join(shown) == "L M N " == text.text
    assert text.stopped
    assert shown[:3] == ["L M N", " ", ""]


def test_near_miss_is_released_and_nothing_shown_twice():
    shown, text = stream([b"Hello", b" Alice", b"!", b" Bye", b"\n", b"Alice:"], ("\n", "Alice:"))
    assert shown == ["Hello", " ", "Alice!", " Bye", "", ""]
    assert text.text == "Hello Alice! Bye"
    assert text.stopped


def test_held_back_text_comes_with_flush():
    shown, text = stream([b"one O", b" P"], ("O P Q",))
    assert shown == ["one ", "", "O P"]
    assert not text.stopped


def test_stop_that_ends_first_wins_then_the_longest():
    assert "".join(stream([b"abc"], ("abc", "b"))[0]) == "a"
    assert "".join(stream([b"a", b"b", b"c"], ("abc", "b"))[0]) == "a"
    assert "".join(stream([b"xabc"], ("bc", "abc"))[0]) == "x"


def test_stop_inside_a_character_of_several_tokens():
    data = "a→b".encode()
    shown, text = stream([data[:2], data[2:3], data[3:]], ("→",))
    assert shown == ["a", "", "", ""] and text.stopped


def test_push_after_the_end_is_refused():
    text = TextStream(lambda token: b"x", ("x",))
    text.push(0)
    with pytest.raises(ValueError, match="after the text's end"):
        text.push(1)


@pytest.mark.parametrize("stop", [("",), ("a", ""), "ab"])
def test_bad_stop_is_refused(stop):
    with pytest.raises(ValueError, match="none of them empty"):
        TextStream(lambda token: b"", stop)


# Few letters, so that stop texts and their beginnings occur often; one, two, three and four bytes each.
letters = st.text(alphabet="abé→👋", max_size=24)
stops = st.lists(st.text(alphabet="abé→👋", min_size=1, max_size=4), max_size=3).map(tuple)
cuts = st.lists(st.integers(0, 200), max_size=12)


@given(letters, stops, cuts)
def test_any_split_gives_the_one_shot_text(expected, stop, borders):
    shown, text = stream(split(expected.encode(), borders), stop)
    assert "".join(shown) == text.text == one_shot(expected, stop)
    assert text.stopped == any(word in expected for word in stop)


@given(st.text(max_size=40), cuts)
def test_any_unicode_text_survives_any_split(expected, borders):
    shown, _ = stream(split(expected.encode(), borders))
    assert "".join(shown) == expected


@given(letters, stops, cuts)
def test_what_is_held_back_could_begin_a_stop(expected, stop, borders):
    """No more is held back than needed: after each token the hidden whole characters begin a stop text."""
    pieces = split(expected.encode(), borders)
    text = TextStream(lambda token: pieces[token], stop)
    data = b""
    for token, piece in enumerate(pieces):
        text.push(token)
        if text.stopped:
            break
        data += piece
        hidden = data.decode(errors="ignore")[len(text.text) :]
        assert not hidden or any(word.startswith(hidden) and word != hidden for word in stop)


@given(st.binary(max_size=16), cuts)
def test_invalid_bytes_equal_pythons_own_decoding(data, borders):
    """Followed by a letter, so that nothing is incomplete at the end."""
    shown, _ = stream([*split(data, borders), b"z"])
    assert "".join(shown) == (data + b"z").decode(errors="replace")
