"""Turn token ids into text that may be shown: whole characters only, and never a stop text.

Both hold text back for as long as a later token could change it. Pure bookkeeping: no I/O, no clock.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable


class TextStream:
    """The text of one generation, token by token.

    State: the bytes of an incomplete character (in the decoder), and ``_held``, whole characters that may be
    the beginning of a stop text. What ``push`` and ``flush`` return, joined, is the final text.

    The generation ends at the first character at which any stop text is complete; of several that end there
    the longest counts. So the result does not depend on how the text is cut into tokens.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: tuple[str, ...] = ()) -> None:
        """Start a text.

        Args:
            token_bytes: gives a token's bytes; b"" for tokens that have no text.
            stop: texts at which to end, none of them empty.

        Raises:
            ValueError: a stop text is empty, or ``stop`` is one text and not a tuple of them.
        """
        if isinstance(stop, str) or any(not text for text in stop):
            raise ValueError(f"stop {stop!r} must be a sequence of texts, none of them empty")
        self._token_bytes = token_bytes
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._shown: list[str] = []
        self.num_shown = 0  # characters that push and flush have returned
        self._flushed = False
        self.stopped = False

    @property
    def text(self) -> str:
        """All text that ``push`` and ``flush`` have returned so far."""
        return "".join(self._shown)

    @property
    def num_known(self) -> int:
        """Whole characters so far, shown or held back."""
        return self.num_shown + len(self._held)

    def push(self, token_id: int) -> str:
        """Take a token.

        Args:
            token_id: the next token.

        Returns:
            The text that may be shown now; empty while a character or a possible stop text is incomplete.

        Raises:
            ValueError: a stop text was found already, or the stream was flushed.
        """
        if self.stopped or self._flushed:
            raise ValueError(f"token {token_id} comes after the text's end: start a new TextStream")
        # Bytes that can still become a character stay in the decoder; bytes that cannot become U+FFFD.
        text = self._held + self._decoder.decode(self._token_bytes(token_id))
        start = _first_stop(text, self._stop)
        if start is not None:
            self.stopped = True
            self._held = ""
            return self._show(text[:start])
        border = len(text) - _longest_beginning(text, self._stop)
        self._held = text[border:]
        return self._show(text[:border])

    def flush(self) -> str:
        """End the text.

        Returns:
            What was held back as a possible stop text. The bytes of an incomplete character are dropped.
        """
        self._flushed = True
        held, self._held = self._held, ""
        return self._show(held)

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
            self.num_shown += len(text)
        return text


def _first_stop(text: str, stop: tuple[str, ...]) -> int | None:
    """Where the stop text that is complete first begins in ``text``; None without one."""
    found = [(start + len(word), start) for word in stop if (start := text.find(word)) >= 0]
    return min(found)[1] if found else None


def _longest_beginning(text: str, stop: tuple[str, ...]) -> int:
    """Characters at the end of ``text`` that may be the beginning of a stop text."""
    for length in range(min(len(text), max(map(len, stop), default=1) - 1), 0, -1):
        if any(word.startswith(text[-length:]) for word in stop):
            return length
    return 0
