"""Malformed bodies, and the server's own OpenAPI document under schemathesis."""

import json
import random
import subprocess
import sys

import pytest
from server_process import Server, check_error

CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


def mutated(rng: random.Random) -> bytes:
    """A body that is wrong in one of many ways."""
    odd = [
        None,
        True,
        -1,
        1e308,
        "",
        "x",
        [],
        {},
        [[]],
        {"a": 1},
        10**30,
        "\ud800",
        [None],
        float("nan"),
        [1, "a"],
    ]
    body: dict = dict(CHAT) if rng.random() < 0.5 else {"prompt": "A", "max_tokens": 2}
    fields = "messages prompt temperature top_p top_k n stop stream stream_options seed logprobs max_tokens x".split()
    fields += "logit_bias response_format top_logprobs echo min_p presence_penalty user model".split()
    for _ in range(rng.randint(1, 3)):
        body[rng.choice(fields)] = rng.choice(odd)
    if rng.random() < 0.2:
        body["messages"] = [{"role": rng.choice(["user", "x", None]), "content": rng.choice(odd)}]
    data = bytearray(json.dumps(body).encode())
    how = rng.random()
    if how < 0.2:
        del data[rng.randrange(len(data)) :]
    elif how < 0.4:
        data[rng.randrange(len(data))] = rng.randrange(256)
    elif how < 0.5:
        data = bytearray(rng.randbytes(rng.randrange(200)))
    return bytes(data)


@pytest.mark.slow
def test_malformed_bodies_never_break_the_server(server: Server):
    rng, seen = random.Random(7), set()
    for i in range(300):
        path = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")[i % 4]
        data = mutated(rng)
        status, _, answer = server.request("POST", path, data, timeout=20)
        assert status in (200, 400, 404), (status, path, data)
        if status != 200:
            check_error(status, json.loads(answer), status)
        seen.add(status)
    assert {200, 400} <= seen
    assert (
        server.json("POST", "/v1/chat/completions", CHAT)[1]["choices"][0]["message"]["content"]
        == "Hello, world!"
    )


@pytest.mark.slow
def test_the_servers_own_document_holds(server: Server):
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--seed", "1"]
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command += ["--checks", f"{checks},negative_data_rejection,unsupported_method", "--max-examples", "8"]
    command += ["--phases", "examples,coverage,fuzzing", "--request-timeout", "20", "--max-failures", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
