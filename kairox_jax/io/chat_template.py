"""Render a conversation with the checkpoint's chat template, in a sandbox that cannot reach the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from json import dumps
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's part for training; here it is plain text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return dumps(value, ensure_ascii=ensure_ascii, indent=indent)


@lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos: str,
    eos: str,
    add_generation_prompt: bool = True,
) -> str:
    """Turn a conversation into the prompt that the model was trained on.

    Args:
        template: the checkpoint's Jinja2 template.
        messages: mappings with ``role`` and ``content``.
        bos: text of the BOS token, "" where there is none.
        eos: text of the EOS token.
        add_generation_prompt: end with the beginning of the assistant's turn.

    Returns:
        The prompt; it begins with at most one ``bos`` (``Tokenizer.encode`` adds no second one).

    Raises:
        ValueError: no template, a message without role and content, or the template refuses the conversation.

    Source: ``apply_chat_template`` of transformers, for the environment's settings.
    """
    if not template:
        raise ValueError(
            "this model has no chat template: give it a plain prompt (`kairox generate`) instead"
        )
    if not messages:
        raise ValueError("messages is empty: a chat needs at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"messages[{i}] is {message!r}: expected a mapping with 'role' and 'content'")
    try:
        text = _compile(template).render(
            messages=messages,
            bos_token=bos,
            eos_token=eos,
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
        )
    except (TemplateError, TypeError, AttributeError, ValueError, LookupError, ArithmeticError) as error:
        raise ValueError(f"the chat template refuses this conversation: {error}") from error
    while bos and text.startswith(bos + bos):
        text = text[len(bos) :]
    return text
