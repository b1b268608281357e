"""Show a generation as it comes, and end it well on Ctrl-C."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from kairox_jax.commands.launch import note

INTERRUPTED = 130  # as a shell reports a process that Ctrl-C ended


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What was printed, and the engine's result; None where Ctrl-C ended it."""

    text: str
    result: Any | None


def show(chunks: Iterable[Any], args: argparse.Namespace) -> Shown:
    """Print each chunk's text at once, and a newline at the end where the text has none.

    Args:
        chunks: ``text`` and ``token_id`` (None where there is only text); the last one has ``result``.
        args: resolved flags; ``quiet`` is read.

    Returns:
        The text and the last chunk's result. After Ctrl-C, the text so far; a line then says how far it got.
    """
    texts: list[str] = []
    num_tokens, result, start = 0, None, perf_counter()
    try:
        for chunk in chunks:
            num_tokens += chunk.token_id is not None
            if chunk.text:
                texts.append(chunk.text)
                print(chunk.text, end="", flush=True)
            result = chunk.result
    except KeyboardInterrupt:
        result = None
    text = "".join(texts)
    if not text.endswith("\n"):
        print(flush=True)
    if result is None:
        seconds = perf_counter() - start
        note(
            args,
            f"interrupted after {num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s with the prompt",
        )
    return Shown(text=text, result=result)
