"""`kairox chat`: a conversation with history, by the model's own chat template."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kairox_jax.commands.flags import Flag, add_flags
from kairox_jax.commands.launch import note, start_engine
from kairox_jax.commands.options import (
    MODEL,
    OUTPUT,
    PLACEMENT,
    SAMPLING,
    generation_config,
    max_tokens_flag,
)
from kairox_jax.commands.streaming import INTERRUPTED, show
from kairox_jax.config import GenerationConfig

FLAGS = {
    "conversation": (
        Flag(dest="system", names=("--system",), metavar="TEXT", help="the system message"),
        max_tokens_flag(512),
    ),
    "model": MODEL,
    "sampling": SAMPLING,
    "placement": PLACEMENT,
    "output": OUTPUT,
}
HELP = "/system TEXT sets the system message, /reset forgets the conversation, /exit (or Ctrl-D) leaves"
# Old turns are dropped until an answer has room: its limit, but at most this part of the context.
_ANSWER_FRAC = 0.25

Message = dict[str, str]


def add_to(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model",
        description=f"Talk with a model; each line is a message, also from a pipe. {HELP}. "
        "Ctrl-C ends an answer early. When the context is full, the oldest turns are dropped.",
        allow_abbrev=False,
    )
    add_flags(parser, FLAGS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, engine_api: Any | None = None) -> int:
    """Carry out the subcommand.

    Args:
        args: resolved flags.
        engine_api: stands in for ``kairox_jax.engine``.

    Returns:
        The exit status: 0, or 130 where Ctrl-C ended the wait for a message.
    """
    config = generation_config(args)
    engine = start_engine(args, engine_api)
    try:
        conversation = Conversation(engine, config, args)
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # noqa: F401  gives input() line editing and history

            note(args, HELP)
        while (line := _read_line(interactive)) is not None:
            if line.startswith("/"):
                if not conversation.command(line):
                    return 0
            elif line.strip():
                _say(conversation, line, interactive)
        return 0
    except KeyboardInterrupt:
        print(flush=True)
        return INTERRUPTED
    finally:
        engine.close()


class Conversation:
    """The messages so far, the system message first where there is one."""

    def __init__(self, engine: Any, config: GenerationConfig, args: argparse.Namespace) -> None:
        """Start with ``args.system``; raises ValueError where the model cannot chat."""
        from kairox_jax.io import render_chat

        self._render = render_chat
        self._engine, self._config, self._args = engine, config, args
        self._system = args.system
        self._turns: list[Message] = []
        self._encode([{"role": "user", "content": "?"}])  # a model without a template should say so now

    @property
    def messages(self) -> list[Message]:
        """The system message and all turns that are still remembered."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return system + self._turns

    def command(self, line: str) -> bool:
        """Carry out a line that begins with a slash; return whether to go on."""
        word, _, rest = line.strip().partition(" ")
        if word in ("/exit", "/quit"):
            return False
        if word == "/reset":
            self._turns = []
            note(self._args, "the conversation is forgotten")
        elif word == "/system":
            self._system = rest.strip() or None
            note(self._args, "system message set" if self._system else "no system message from now on")
        elif word == "/help":
            print(HELP, file=sys.stderr)
        else:
            print(f"kairox: {word} is no command: {HELP}", file=sys.stderr)
        return True

    def say(self, text: str) -> None:
        """Send a message, show the answer, remember both.

        Raises:
            ValueError: the message alone does not fit into the context; it is not remembered.
        """
        self._turns.append({"role": "user", "content": text})
        try:
            prompt = self._fit()
        except ValueError:
            self._turns.pop()
            raise
        room = self._engine.context_length - len(prompt)
        # A new seed for each turn, or equal prompts would get equal answers; the run stays repeatable.
        config = replace(
            self._config,
            max_tokens=min(self._config.max_tokens, room),
            seed=self._config.seed + len(self._turns) // 2,
        )
        shown = show(self._engine.stream(prompt, config), self._args)
        self._turns.append({"role": "assistant", "content": shown.text})
        if shown.result is not None:
            note(self._args, shown.result.stats.line())

    def _fit(self) -> list[int]:
        """Encode the conversation; drop the oldest turns, and say so, until an answer has room."""
        context = self._engine.context_length
        wanted = min(self._config.max_tokens, int(context * _ANSWER_FRAC))
        dropped = 0
        while len(prompt := self._encode(self.messages)) + wanted > context and len(self._turns) > 1:
            del self._turns[:2]
            dropped += 1
        if dropped:
            note(
                self._args,
                f"the context of {context} tokens is full: the oldest {dropped} turns are forgotten",
            )
        if len(prompt) >= context:
            raise ValueError(
                f"the message takes {len(prompt)} tokens and the context has {context}: "
                "shorten it, or start with a larger -c"
            )
        return prompt

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        tokenizer = self._engine.tokenizer
        text = self._render(
            self._engine.chat_template,
            messages,
            bos=tokenizer.token_text(tokenizer.bos_id),
            eos=tokenizer.token_text(next(iter(tokenizer.eos_ids), None)),
        )
        return tokenizer.encode(text)


def _say(conversation: Conversation, line: str, interactive: bool) -> None:
    """Send a message; a person may correct one that is refused, a script ends with the error."""
    try:
        conversation.say(line)
    except ValueError as error:
        if not interactive:
            raise
        print(f"kairox: error: {error}", file=sys.stderr)


def _read_line(interactive: bool) -> str | None:
    """The next message; None at the end of input."""
    if interactive:
        try:
            return input("> ")
        except EOFError:
            print(file=sys.stderr)
            return None
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None
