"""Limits, keys, hosts, timeouts and the shape of errors."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import Server, check_error, started

LONG = {"prompt": "L", "temperature": 0, "max_tokens": 4000}


@pytest.mark.parametrize(
    ("method", "path", "body", "want"),
    [
        ("GET", "/nothing", None, 404),
        ("GET", "/static/../app.py", None, 404),
        ("GET", "/static/%2e%2e/app.py", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("POST", "/v1/models", {}, 405),
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"\xff\xfe", 400),
        ("POST", "/v1/completions", b"[" * 100_000, 400),
        ("POST", "/v1/completions", b'{"prompt": "x", "top_k": ' + b"9" * 5000 + b"}", 400),
        ("POST", "/v1/completions", {"prompt": [10**9]}, 400),
        ("POST", "/v1/completions", {"prompt": "A", "logit_bias": {"100000": 1}}, 400),
        ("POST", "/v1/completions", {"prompt": "A", "stream_options": {"include_usage": True}}, 400),
        ("POST", "/v1/completions", {"prompt": ["A"] * 60, "n": 2}, 400),
        ("POST", "/detokenize", {"tokens": [-1]}, 400),
        ("POST", "/v1/completions", b'{"prompt": "' + b"x" * (5 * 2**20) + b'"}', 413),
        ("GET", "/live?since=x", None, 400),
    ],
)
def test_errors_have_openais_shape(server: Server, method: str, path: str, body: object, want: int):
    check_error(*server.json(method, path, body), want)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (
            "completions",
            {"prompt": "A", "max_completion_tokens": 5},
            "max_completion_tokens",
            "is max_tokens",
        ),
        ("completions", {"messages": [{"role": "user", "content": "A"}]}, "messages", "/v1/chat/completions"),
        ("completions", {"prompt": "A", "top_logprobs": 2}, "top_logprobs", "logprobs"),
        ("chat/completions", {"prompt": "A"}, "prompt", "belongs to /v1/completions"),
        ("completions", {"prompt": [3, 10**6]}, "prompt", "token id 1000000"),
        ("completions", {"prompt": [[3], [-1]]}, "prompt", "token id -1"),
        ("completions", {"prompt": "A", "logit_bias": {"100000": 1}}, "logit_bias", "token id 100000"),
        ("completions", {"prompt": "A", "stream_options": {}}, "stream_options", "stream: true"),
        ("completions", {"prompt": "A", "echo": True, "logprobs": 1}, "echo", "logprobs"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "A"}]}, "messages[0].role", "'user'"),
        ("chat/completions", {"messages": []}, "messages", "at least 1"),
        ("completions", {"prompt": "A", "stop": ["x"] * 17}, "stop", "at most 16"),
        ("completions", {"prompt": "A", "n": 0}, "n", "greater than or equal to 1"),
        ("completions", {"prompt": "A", "stream": "yes"}, "stream", "valid boolean"),
        (
            "completions",
            {"prompt": "A", "stream": True, "stream_options": {"x": 1}},
            "stream_options.x",
            "leave it out",
        ),
        ("completions", {"prompt": "A", "stop": [1]}, "stop", "expected a text"),
        ("completions", {"prompt": "A", "logit_bias": {"3": "x"}}, "logit_bias.3", "valid number"),
        ("completions", {"prompt": "A", "logit_bias": {"abc": 1}}, "logit_bias", "in digits"),
        ("completions", {"prompt": ["A"] * 65}, "prompt", "ask for fewer"),
    ],
)
def test_errors_name_the_field_and_a_code(
    server: Server, path: str, body: dict[str, object], param: str, message: str
):
    status, answer = server.json("POST", f"/v1/{path}", body)
    check_error(status, answer, 400)
    assert answer["error"]["param"] == param and message in answer["error"]["message"], answer
    assert answer["error"]["code"] in ("unknown_field", "invalid_value")


def test_a_body_without_a_length_is_limited_too(server: Server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        try:
            for _ in range(80):
                connection.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert connection.recv(64).startswith(b"HTTP/1.1 413")


def test_tokens_there_and_back(server: Server):
    _, answer = server.json("POST", "/tokenize", {"content": "Aé"})
    assert server.json("POST", "/detokenize", answer)[1] == {"content": "Aé"}
    _, named = server.json("POST", "/tokenize", {"content": "Aé", "with_pieces": True, "add_special": True})
    assert [t["piece"] for t in named["tokens"]] == ["<s>", "A", "bytes:\\xc3", "bytes:\\xa9"]


def test_what_the_server_tells(server: Server):
    _, props = server.json("GET", "/props")
    assert props["placement"]["slots_per_layer"] == [64, 64] and props["parallel"] == 1
    assert props["defaults"]["temperature"] == 1 and props["context_length"] == 4096
    assert (
        server.json("POST", "/v1/completions", {"prompt": "L", "temperature": 0, "max_tokens": 50})[0] == 200
    )
    _, live = server.json("GET", "/live")
    steps = live["steps"]
    assert len({len(column) for column in steps.values()}) == 1 and len(steps["seq"]) >= 49
    assert len(live["residency"]["bins"]) == 2 and 0 < live["hit_rate"] < 1
    _, later = server.json("GET", f"/live?since={steps['seq'][-1]}")
    assert later["steps"]["seq"] == []
    _, headers, text = server.request("GET", "/metrics")
    assert headers["content-type"].startswith("text/plain")
    metrics = dict(re.findall(r"^(kairox_\S+) (\S+)$", text.decode(), re.MULTILINE))
    active = [
        float(metrics[f'kairox_active_neurons_total{{place="{place}"}}']) for place in ("device", "host")
    ]
    assert active[0] / sum(active) == pytest.approx(live["hit_rate"], abs=1e-5)
    assert float(metrics["kairox_time_to_first_token_seconds_count"]) > 0
    assert float(metrics['kairox_step_seconds_total{part="gpu"}']) > 0
    assert {"kairox_queue_length", "kairox_link_bytes_total", "kairox_hit_rate"} <= set(metrics)


def test_headers_and_hosts(server: Server):
    _, headers, _ = server.request("GET", "/")
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert headers["x-content-type-options"] == "nosniff" and headers["x-request-id"].startswith("req-")
    assert "access-control-allow-origin" not in headers
    for host in ("evil.example", "127.0.0.1.evil.example", ""):
        check_error(*server.json("GET", "/props", headers={"Host": host}), 403)
    for host in ("localhost:1", "127.0.0.1", "[::1]:80", "LOCALHOST"):
        assert server.json("GET", "/props", headers={"Host": host})[0] == 200
    # A page of another origin can send text without asking first, so text is not understood.
    check_error(
        *server.json("POST", "/tokenize", b'{"content": "x"}', headers={"Content-Type": "text/plain"}), 400
    )


def test_prompts_stay_out_of_the_log(server: Server):
    body = {"prompt": "a very secret prompt", "unknown": "a very secret value"}
    assert server.json("POST", "/v1/completions", body)[0] == 400
    del body["unknown"]
    assert server.json("POST", "/v1/completions", body)[0] == 200
    assert "secret" not in server.log.read_text()


RIGHT = {"Authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def strict(scripted_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key, one place in its queue and little patience."""
    flags = (
        "--gpu-cache-neurons",
        "8",
        "-c",
        "4096",
        "--timeout",
        "2",
        "--max-waiting",
        "1",
        "--log-prompts",
    )
    log = tmp_path_factory.mktemp("strict") / "log"
    origin = ("--cors-origin", "https://a.example")
    with started(scripted_model, log, *flags, *origin, KAIROX_API_KEY="sesame") as running:
        yield running


def test_the_key_is_asked_for(strict: Server):
    for path in ("/v1/models", "/props", "/metrics", "/live", "/openapi.json"):
        for wrong in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Basic sesame"}):
            check_error(*strict.json("GET", path, headers=wrong), 401)
        assert strict.request("GET", path, headers=RIGHT)[0] == 200
    assert strict.request("GET", "/")[0] == strict.request("GET", "/health")[0] == 200


def test_only_listed_origins_may_call(strict: Server):
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    _, headers, _ = strict.request("OPTIONS", "/v1/completions", headers=asked)
    assert headers["access-control-allow-origin"] == "https://a.example"
    _, headers, _ = strict.request("GET", "/health", headers={"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in headers


def test_a_request_that_takes_too_long_ends(strict: Server):
    begin = time.monotonic()
    status, headers, answer = strict.request("POST", "/v1/completions", LONG, headers=RIGHT)
    check_error(status, json.loads(answer), 504)
    assert headers["x-should-retry"] == "false" and json.loads(answer)["error"]["type"] == "timeout_error"
    assert 2 <= time.monotonic() - begin < 10
    assert '"prompt": "L"' in strict.log.read_text() and "sesame" not in strict.log.read_text()


def test_a_full_queue_and_a_waiting_client_that_leaves(strict: Server):
    def live(name: str) -> int:
        return strict.json("GET", "/live", headers=RIGHT)[1][name]

    first = threading.Thread(
        target=strict.json, args=("POST", "/v1/completions", LONG), kwargs={"headers": RIGHT}
    )
    first.start()
    while not live("active"):
        time.sleep(0.01)
    head = "Authorization: Bearer sesame\r\n"
    waiting = threading.Thread(
        target=strict.leave, args=("/v1/completions", b'{"prompt": "A", "stream": true}', 0, 0.4, head)
    )
    waiting.start()
    while not live("waiting"):
        time.sleep(0.01)
    status, answer = strict.json("POST", "/v1/completions", {"prompt": "A"}, headers=RIGHT)
    check_error(status, answer, 429)
    assert answer["error"]["code"] == "queue_full"
    waiting.join()
    time.sleep(0.1)
    body = {"prompt": "A", "temperature": 0, "max_tokens": 2}
    assert strict.json("POST", "/v1/completions", body, headers=RIGHT)[0] == 200  # its place is free
    first.join()


def test_the_page_shows_every_part_of_the_budget(server: Server):
    script = server.request("GET", "/static/live.js")[2].decode()
    listed = re.search(r"const PARTS = \[(.*?)\n?\];", script, re.DOTALL)
    assert listed is not None
    parts = re.findall(r"\['(\w+)', '\w+'\]", listed[1])
    budget = server.json("GET", "/props")[1]["budget"]
    assert sorted(parts) == sorted(budget.keys() - {"total", "limit"})
    styles = server.request("GET", "/static/style.css")[2].decode()
    assert all(styles.count(f"--part-{i + 1}:") == 3 for i in range(len(parts)))
