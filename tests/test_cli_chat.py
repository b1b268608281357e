"""`kairox chat` over a stand-in engine: history, commands, a full context."""

import io
import signal
import subprocess
import sys

import pytest
from cli_fake import FakeApi
from test_cli_generate import ENV, FAKE, clean_environment  # noqa: F401

from kairox_jax.cli import main


@pytest.fixture
def chat(capsys, monkeypatch):
    def run(lines: str, *words: str, api: FakeApi | None = None) -> tuple[int, str, str, FakeApi]:
        api = api or FakeApi(answer="yes")
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        status = main(["chat", *words], engine_api=api)
        out, err = capsys.readouterr()
        return status, out, err, api

    return run


def prompts(api: FakeApi) -> list[str]:
    return ["".join(map(chr, prompt)) for prompt, _, _ in api.requests]


def test_history_grows_turn_by_turn(chat):
    status, out, err, api = chat("one\n\ntwo\n")
    assert (status, out) == (0, "yes\nyes\n")
    assert prompts(api) == [
        "[user]one[assistant]",
        "[user]one[assistant]yes[user]two[assistant]",
    ]
    assert err.splitlines() == ["kairox: fake device, everything in one place"] + 2 * ["kairox: 3 tokens"]
    assert api.closed == 1


def test_commands(chat):
    status, out, err, api = chat(
        "a\n/reset\nb\n/system be brief\nc\n/system\n/what\n/help\n/exit\nnever\n", "--quiet"
    )
    assert (status, out) == (0, "yes\n" * 3)
    assert prompts(api) == [
        "[user]a[assistant]",
        "[user]b[assistant]",
        "[system]be brief[user]b[assistant]yes[user]c[assistant]",
    ]
    assert "kairox: /what is no command: /system TEXT sets" in err


def test_system_flag_survives_reset(chat):
    _, _, _, api = chat("a\n/reset\nb\n", "--system", "be kind")
    assert prompts(api)[-1] == "[system]be kind[user]b[assistant]"


def test_turns_differ_in_seed_and_runs_repeat(chat):
    seeds = [[config.seed for _, config, _ in chat("a\nb\n", "--seed", "7")[3].requests] for _ in range(2)]
    assert seeds == [[7, 8], [7, 8]]


def test_full_context_drops_the_oldest_turns_and_says_so(chat):
    api = FakeApi(answer="yes", context_length=80)
    lines = [f"message number {number}" for number in range(5)]
    status, _, err, api = chat("\n".join(lines) + "\n", "--system", "S", "-n", "20", api=api)
    assert status == 0
    assert "kairox: the context of 80 tokens is full: the oldest 1 turns are forgotten" in err
    last, config, _ = api.requests[-1]
    assert "".join(map(chr, last)).startswith("[system]S[user]message number ")
    assert "".join(map(chr, last)).endswith("[user]message number 4[assistant]")
    assert all(len(prompt) + config.max_tokens <= 80 for prompt, config, _ in api.requests)


def test_one_message_longer_than_the_context_gives_both_counts(chat):
    status, _, err, api = chat("x" * 300 + "\n")
    assert status == 2 and not api.requests and api.closed == 1
    assert "the message takes 317 tokens and the context has 200: shorten it" in err


def test_a_person_may_correct_a_message_that_is_too_long(chat, monkeypatch):
    monkeypatch.setattr(io.StringIO, "isatty", lambda self: True, raising=False)
    lines = iter(["x" * 300, "short"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or (_ for _ in ()).throw(EOFError))
    status, out, err, api = chat("")
    assert (status, out) == (0, "yes\n")
    assert "kairox: error: the message takes 317 tokens" in err
    assert prompts(api) == ["[user]short[assistant]"]


def test_a_model_without_a_template_says_so_at_once(chat):
    status, _, err, api = chat("hi\n", api=FakeApi(chat_template=None))
    assert status == 2 and not api.requests and api.closed == 1
    assert "no chat template" in err and "kairox generate" in err


def test_a_template_that_begins_with_bos_is_not_doubled(chat):
    api = FakeApi(
        chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    assert prompts(chat("hi\n", api=api)[3]) == ["<s>hi</s>"]


def test_ctrl_c_ends_the_answer_and_the_chat_goes_on():
    words = ["0.05", "abcdefghij" * 20, "chat", "-n", "100"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*FAKE, *words], env=ENV, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        first = process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        process.stdin.write(b"/exit\n")
        process.stdin.close()
        process.stdout.read()
        errors = process.stderr.read().decode()
        assert process.wait(10) == 0
    assert first == b"abc"
    assert "interrupted after" in errors and "Traceback" not in errors
