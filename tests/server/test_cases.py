"""What broke in other servers, over HTTP: streams, stops, limits, seeds, clients that go away."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from scripted_model import EMOJI, build
from server_process import Server, started

GREEDY = {"temperature": 0, "max_tokens": 60}
HELLO = [{"role": "user", "content": "hi"}]


def streamed(events: list) -> list[str]:
    return [event["choices"][0]["text"] for event in events[:-1]]


def test_an_emoji_over_several_tokens_is_held_back(server: Server):
    pieces = streamed(server.events("/v1/completions", {"prompt": "e", **GREEDY}))
    assert [piece for piece in pieces if piece] == [" face", EMOJI, " bye"]


@pytest.mark.parametrize("limit", [2, 3, 4])
def test_a_limit_inside_an_emoji_drops_its_bytes(server: Server, limit: int):
    events = server.events("/v1/completions", {"prompt": "e", "temperature": 0, "max_tokens": limit})
    assert "".join(streamed(events)) == " face" and events[-2]["choices"][0]["finish_reason"] == "length"
    _, whole = server.json("POST", "/v1/completions", {"prompt": "e", "temperature": 0, "max_tokens": limit})
    assert whole["choices"][0]["text"] == " face" and whole["usage"]["completion_tokens"] == limit


def test_a_stop_text_over_several_tokens(server: Server):
    pieces = streamed(server.events("/v1/completions", {"prompt": "A", "stop": ["O P Q"], **GREEDY}))
    assert "".join(pieces) == " B C D E F G H I J K L M N "
    with_logprobs = {"prompt": "A", "stop": ["O P Q"], "logprobs": 0, **GREEDY}
    _, whole = server.json("POST", "/v1/completions", with_logprobs)
    assert whole["choices"][0]["logprobs"]["tokens"][-2:] == [
        " N",
        " O",
    ]  # its space is text, its letter is not
    events = server.events("/v1/completions", with_logprobs)
    names = [n for e in events[:-1] if (found := e["choices"][0]["logprobs"]) for n in found["tokens"]]
    assert names == whole["choices"][0]["logprobs"]["tokens"]


def test_a_stop_text_that_almost_comes(server: Server):
    pieces = streamed(server.events("/v1/completions", {"prompt": "?", "stop": ["\n", "Alice:"], **GREEDY}))
    assert "".join(pieces) == " said Alice!!" and " said" in pieces


def test_a_prompt_beyond_the_context_is_refused_with_both_counts(server: Server):
    for path, body in (
        ("/v1/completions", {"prompt": "z" * 5000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "z" * 5000}]}),
    ):
        for stream in (False, True):
            status, answer = server.json("POST", path, {**body, "stream": stream})
            assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
            assert "500" in answer["error"]["message"] and "4096" in answer["error"]["message"]
    assert server.json("POST", "/v1/completions", {"prompt": "A", **GREEDY})[0] == 200


def test_fields_are_honoured_or_refused(server: Server):
    body = {"messages": HELLO, "n": 2, "max_completion_tokens": 3, "temperature": 0}
    _, answer = server.json("POST", "/v1/chat/completions", body)
    assert [c["message"]["content"] for c in answer["choices"]] == ["Hello, world"] * 2
    for field, value in {"unknown": 1, "tools": [], "best_of": 2, "store": True, "max_token": 5}.items():
        status, answer = server.json("POST", "/v1/chat/completions", {**body, field: value})
        assert status == 400 and answer["error"]["param"] == field and field in answer["error"]["message"]


def test_usage_of_a_stream(server: Server):
    body = {"messages": HELLO, "stream_options": {"include_usage": True}, "temperature": 0}
    *chunks, finish, usage, done = server.events("/v1/chat/completions", body)
    assert all(chunk["usage"] is None and chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert finish["choices"][0]["finish_reason"] == "stop" and finish["choices"][0]["delta"] == {}
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4
    assert done == "[DONE]"
    events = server.events("/v1/chat/completions", {"messages": HELLO, "temperature": 0})
    assert all("usage" not in event for event in events[:-1])


def test_a_model_without_a_template_takes_no_chat(tmp_path: Path):
    model = build(tmp_path / "plain", template=None)
    with started(model, tmp_path / "log", "--gpu-cache-neurons", "8") as server:
        status, answer = server.json("POST", "/v1/chat/completions", {"messages": HELLO})
        assert status == 400 and "no chat template" in answer["error"]["message"]
        assert server.json("GET", "/props")[1]["chat"] is False
        assert server.json("POST", "/v1/completions", {"prompt": "A", **GREEDY})[0] == 200


def test_exactly_one_bos(server: Server):
    _, answer = server.json("POST", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == len(["<s>", "<|user|>", "h", "i", "<|assistant|>"])
    for prompt in ("A", "<s>A"):
        _, answer = server.json("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert answer["usage"]["prompt_tokens"] == 2


def test_a_seed_repeats(server: Server):
    body = {"prompt": "A", "temperature": 0.7, "max_tokens": 20}
    texts = [
        server.json("POST", "/v1/completions", {**body, "seed": seed})[1]["choices"][0]["text"]
        for seed in (42, 42, 43, 44)
    ]
    assert texts[0] == texts[1] and len(set(texts)) > 1


def test_eight_equal_requests_at_once(server: Server):
    body = {"prompt": "A", **GREEDY}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.json("POST", "/v1/completions", body), range(8)))
    assert {status for status, _ in answers} == {200}
    assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_that_leaves_during_decode_frees_the_engine(server: Server, stream: str):
    body = b'{"prompt": "L", "temperature": 0, "max_tokens": 4000, "stream": %s}' % stream.encode()
    server.leave("/v1/completions", body, 500 if stream == "true" else 0, wait_s=0.3)
    begin = time.monotonic()
    server.idle()
    assert server.json("POST", "/v1/completions", {"prompt": "A", **GREEDY})[0] == 200
    assert time.monotonic() - begin < 2.0  # all 4000 tokens would take several seconds
    _, _, metrics = server.request("GET", "/metrics")
    assert b'kairox_generations_total{outcome="Cancelled"}' in metrics


def test_a_client_that_leaves_during_prefill_frees_the_engine(server: Server):
    def body(first: str) -> dict:
        return {"prompt": first + "z" * 1900, "max_tokens": 1, "stream": True}

    def seconds(call: Callable[[], object]) -> float:
        begin = time.monotonic()
        call()
        return time.monotonic() - begin

    server.events("/v1/completions", body("a"))  # compiles
    # Of several tries the fastest: a whole prompt takes some hundredths of a second, other work of the machine as much.
    whole_s = min(seconds(lambda c=c: server.events("/v1/completions", body(c))) for c in "bcdef")

    def left(first: str) -> None:
        server.leave("/v1/completions", json.dumps(body(first)).encode(), 0, wait_s=whole_s / 8)
        server.idle()

    assert min(seconds(lambda c=c: left(c)) for c in "ghijk") < 0.7 * whole_s
    assert server.json("POST", "/v1/completions", {"prompt": "A", **GREEDY})[0] == 200
