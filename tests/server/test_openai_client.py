"""The official clients against a real server process with the scripted model."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted_model import DEFAULT, EMOJI, LETTERS, token_id
from server_process import Server, started

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "scripted" and client.models.retrieve("scripted") == model
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
        client.models.retrieve("gpt-4")


def test_chat(client):
    answer = client.chat.completions.create(model="scripted", messages=HELLO, temperature=0)
    (choice,) = answer.choices
    assert choice.message.content == "Hello, world!" and choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    # <s> <|user|> h i <|assistant|>: one BOS, though the template writes one and the tokenizer adds one.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        5,
        4,
        9,
    )


def test_chat_with_parts_and_history(client):
    messages = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    answer = client.chat.completions.create(model="scripted", messages=messages, temperature=0)
    again = client.chat.completions.create(
        model="scripted", messages=[*messages, answer.choices[0].message], temperature=0
    )
    assert answer.choices[0].message.content == again.choices[0].message.content == "Hello, world!"


def test_streamed_chat_equals_whole(client):
    stream = client.chat.completions.create(
        model="scripted",
        messages=HELLO,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello, world!"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    tokens = [t.token for c in chunks[:-1] if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert tokens == ["Hello", ",", " world", "!"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 4
    assert {c.id for c in chunks} == {chunks[0].id}


def test_completion_streamed_and_not(client):
    settings = {"model": "scripted", "prompt": "A", "temperature": 0, "max_tokens": 5}
    whole = client.completions.create(**settings)
    assert whole.choices[0].text == " B C D E F" and whole.choices[0].finish_reason == "length"
    chunks = list(client.completions.create(**settings, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == " B C D E F"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_default_limit_of_a_completion_is_openais(client):
    answer = client.completions.create(model="scripted", prompt="L", temperature=0)
    assert answer.usage.completion_tokens == 16


def test_prompts_of_every_form(server, client):
    _, ids = server.json("POST", "/tokenize", {"content": "A", "add_special": True})
    for prompt in (["A", "?"], [ids["tokens"], "?"], [ids["tokens"], ids["tokens"]], ids["tokens"]):
        if prompt == [ids["tokens"], "?"]:
            with pytest.raises(openai.BadRequestError, match="prompt: expected a text"):
                client.completions.create(model="scripted", prompt=prompt)
            continue
        answer = client.completions.create(
            model="scripted", prompt=prompt, temperature=0, max_tokens=2, echo=True
        )
        want = {"A": "A B C", "?": "? said Al"}
        texts = [c.text for c in answer.choices]
        if prompt == ["A", "?"]:
            assert texts == list(want.values())
        else:
            assert set(texts) == {"A B C"}
        assert [c.index for c in answer.choices] == list(range(len(texts)))
        assert answer.usage.prompt_tokens == 2 * len(texts)


def test_stop(client):
    for stop in (" E", [" Z", " E F"]):
        answer = client.completions.create(
            model="scripted", prompt="A", temperature=0, stop=stop, max_tokens=30
        )
        assert answer.choices[0].text == " B C D" and answer.choices[0].finish_reason == "stop"


def test_logprobs_are_of_the_models_own_distribution(client):
    """Whatever temperature, bias and penalties do to the choice, the log-probability of a token is the model's."""
    settings = {"model": "scripted", "prompt": "A", "max_tokens": 1, "logprobs": 20}
    plain = client.completions.create(**settings, temperature=0).choices[0].logprobs
    answer = plain.token_logprobs[0]
    assert plain.tokens == [" B"] and plain.top_logprobs[0][" B"] == answer
    assert sum(math.exp(v) for v in plain.top_logprobs[0].values()) < 1
    assert list(plain.top_logprobs[0].values()) == sorted(plain.top_logprobs[0].values(), reverse=True)
    token = token_id(DEFAULT)
    biased = (
        client.completions.create(**settings, temperature=0, logit_bias={str(token): 100}).choices[0].logprobs
    )
    assert biased.tokens == [DEFAULT]
    assert biased.token_logprobs[0] == pytest.approx(plain.top_logprobs[0][DEFAULT], abs=1e-5)


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="scripted", messages=HELLO, temperature=0, logprobs=True, top_logprobs=2
    )
    entries = answer.choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["Hello", ",", " world", "!"]
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token
        assert entry.logprob == entry.top_logprobs[0].logprob < 0


def test_logprobs_name_parts_of_a_character_by_their_bytes(client):
    answer = client.completions.create(model="scripted", prompt="e", temperature=0, logprobs=0)
    assert answer.choices[0].text == f" face{EMOJI} bye"
    names = [f"bytes:\\x{byte:02x}" for byte in EMOJI.encode()]
    assert answer.choices[0].logprobs.tokens == [" face", *names, " bye"]
    assert answer.choices[0].logprobs.text_offset == [0, 5, 5, 5, 5, 6]


def test_n_takes_the_seeds_that_follow(client):
    settings = {"model": "scripted", "prompt": "z", "temperature": 1.5, "max_tokens": 12}
    three = client.completions.create(**settings, n=3, seed=5)
    alone = [client.completions.create(**settings, seed=5 + i).choices[0].text for i in range(3)]
    assert [choice.text for choice in three.choices] == alone and len(set(alone)) == 3
    chunks = list(client.completions.create(**settings, n=3, seed=5, stream=True))
    texts = ["".join(c.choices[0].text for c in chunks if c.choices[0].index == i) for i in range(3)]
    assert texts == alone


def test_penalties_and_bias_change_the_choice(client, server):
    settings = {"model": "scripted", "prompt": "L", "temperature": 0, "max_tokens": 40}
    plain = client.completions.create(**settings).choices[0].text
    assert plain.count(" x0") == 3
    assert client.completions.create(**settings, frequency_penalty=2).choices[0].text.count(" x0") < 3
    _, found = server.json("POST", "/tokenize", {"content": "L"})
    biased = client.completions.create(**settings, logit_bias={str(found["tokens"][0]): 100}).choices[0].text
    assert biased == "L" * 40


def test_ignore_eos(client):
    settings = {"model": "scripted", "prompt": "A", "temperature": 0, "max_tokens": 40}
    assert client.completions.create(**settings).usage.completion_tokens == len(LETTERS)
    more = client.completions.create(**settings, extra_body={"ignore_eos": True})
    assert more.usage.completion_tokens == 40 and more.choices[0].text.startswith("".join(LETTERS))


@pytest.mark.parametrize(
    "schema", [None, {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}]
)
def test_json_answers(client, schema):
    form = {"type": "json_object"}
    if schema is not None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        model="scripted", messages=HELLO, seed=3, response_format=form, max_tokens=300, frequency_penalty=1
    )
    choice = answer.choices[0]
    if choice.finish_reason == "stop":
        value = json.loads(choice.message.content)
        assert isinstance(value, dict) and (schema is None or value["a"] in (1, 2))
    else:
        assert choice.message.content.lstrip().startswith("{")


def test_errors(client):
    with pytest.raises(openai.BadRequestError, match="unknown or unsupported field 'tools'"):
        client.chat.completions.create(
            model="scripted", messages=HELLO, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="scripted", messages=HELLO, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="use 'scripted'") as error:
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert error.value.code == "model_not_found" and error.value.param == "model"


async def _chat(client: openai.AsyncOpenAI) -> str:
    stream = await client.chat.completions.create(
        model="scripted", messages=HELLO, temperature=0, stream=True
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def test_the_asynchronous_client(server):
    import asyncio

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(_chat(client) for _ in range(4)))

    assert asyncio.run(run()) == ["Hello, world!"] * 4


def test_a_timeout_is_not_tried_again(scripted_model: Path, tmp_path: Path):
    """The client tries 408 and 5xx again, with the whole work from its start, unless it is told not to."""
    flags = ("--gpu-cache-neurons", "8", "-c", "4096", "--timeout", "0.5")
    with started(scripted_model, tmp_path / "log", *flags) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=5) as client:
            long: Any = dict(model="scripted", prompt="L", temperature=0, max_tokens=4000)
            with pytest.raises(openai.InternalServerError, match="longer than 0.5 s") as error:
                client.completions.create(**long)
            assert error.value.status_code == 504 and error.value.code == "timeout"
            with pytest.raises(openai.APIError, match="longer than 0.5 s"):
                list(client.completions.create(**long, stream=True))
        # A stream's client has its last event before the server has counted the request.
        wanted = (
            b'kairox_requests_total{route="/v1/completions",status="504"} 1.0',
            b'kairox_generations_total{outcome="TimedOut"} 2.0',
        )
        end = time.monotonic() + 30
        while not all(line in (text := server.request("GET", "/metrics")[2]) for line in wanted):
            assert time.monotonic() < end, text.decode()
            time.sleep(0.05)
