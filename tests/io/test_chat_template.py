"""Rendered conversations: the text that the model was trained on, or one line saying why not."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kairox_jax.io import open_checkpoint, render_chat

USER = [{"role": "user", "content": "Hi"}]


@pytest.mark.model
def test_default_model(default_model: Path) -> None:
    checkpoint = open_checkpoint(default_model)
    text = render_chat(checkpoint.chat_template, USER, bos="<|im_start|>", eos="<|im_end|>")
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    history = [*USER, {"role": "assistant", "content": "Hello."}]
    closed = render_chat(checkpoint.chat_template, history, bos="", eos="", add_generation_prompt=False)
    assert closed.endswith("<|im_start|>assistant\nHello.<|im_end|>\n")


@pytest.mark.parametrize("template", [None, ""])
def test_without_a_template(template: str | None) -> None:
    with pytest.raises(ValueError, match="has no chat template: give it a plain prompt"):
        render_chat(template, USER, bos="<s>", eos="</s>")


def test_exactly_one_bos(write_llama: Callable[..., Path]) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{{ bos_token if loop.first }}{{ m.content }}{% endfor %}"
    )
    assert render_chat(template, USER, bos="<s>", eos="</s>") == "<s>Hi"
    checkpoint = open_checkpoint(write_llama())
    tokenizer = checkpoint.tokenizer()
    text = render_chat(checkpoint.chat_template, USER, bos=tokenizer.token_text(tokenizer.bos_id), eos="")
    assert text == "<|im_start|>Hi"
    assert tokenizer.encode(text, add_bos=True).count(1) == 1


def test_what_templates_use() -> None:
    """Trimmed blocks, loop controls, JSON, generation marks, the date."""
    template = (
        "{% for m in messages %}\n"
        "    {% if m.role == 'system' %}\n{% continue %}\n    {% endif %}\n"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}|\n"
        "{% endfor %}\n"
        "{% if tools %}tools{% endif %}{{ strftime_now('%Y') | length }}"
    )
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "é<"}]
    assert render_chat(template, messages, bos="", eos="") == '"é<"|\n4'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "refuses this conversation"),
        ("{{ messages[0].content + 1 }}", "refuses this conversation"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "refuses this conversation"),
        ("{% for i in range(999999999) %}{% endfor %}", "refuses this conversation"),
    ],
)
def test_refusals_and_the_sandbox(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render_chat(template, USER, bos="", eos="")


@pytest.mark.parametrize(
    "messages", [[], [{"content": "Hi"}], [{"role": "user"}], [{"role": 1, "content": ""}]]
)
def test_refuses_messages(messages: list[dict]) -> None:
    with pytest.raises(ValueError, match="messages"):
        render_chat("{{ messages }}", messages, bos="", eos="")
