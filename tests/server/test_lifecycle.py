"""Loading, shutdown and kill -9."""

import json
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from server_process import Server, check_error, started

CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
LONG = {"prompt": "L", "temperature": 0, "max_tokens": 1200}


def stream_lines(server: Server, lines: list[str], started_event: threading.Event) -> None:
    """Read a long stream line by line until it ends."""
    body = json.dumps({**LONG, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        with connection.makefile("rb") as file:
            try:
                for line in file:
                    lines.append(line.decode())
                    if line.startswith(b"data:"):
                        started_event.set()
            except ConnectionResetError:
                pass


def in_background(server: Server) -> tuple[threading.Thread, list[str]]:
    lines: list[str] = []
    begun = threading.Event()
    thread = threading.Thread(target=stream_lines, args=(server, lines, begun))
    thread.start()
    assert begun.wait(30)
    return thread, lines


@pytest.mark.parametrize("grace", ["60", "0.3"])
def test_shutdown_gives_every_stream_an_end(scripted_model: Path, tmp_path: Path, grace: str):
    flags = ("--gpu-cache-neurons", "8", "--grace", grace, "-c", "4096")
    with started(scripted_model, tmp_path / "log", *flags) as server:
        thread, lines = in_background(server)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        if grace == "60":
            check_error(*server.json("POST", "/v1/completions", {"prompt": "A"}), 503)
        thread.join(60)
        assert server.process.wait(30) == 0
        assert f"running requests may take up to {grace} s" in server.log.read_text()
        events = [line for line in lines if line.startswith("data:")]
        if grace == "60":
            assert events[-1] == "data: [DONE]\n"
        else:
            assert "shutting down" in json.loads(events[-1][6:])["error"]["message"]
            assert lines[-1] == "\r\n"  # the end of the chunked answer: it was not cut off


def test_it_listens_while_loading_and_survives_kill_9(scripted_model: Path, tmp_path: Path):
    cache = tmp_path / "compiled"
    flags = ("--gpu-cache-neurons", "8", "-c", "4096")
    env = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    with started(scripted_model, tmp_path / "log", *flags, ready=False, **env) as server:
        check_error(*server.json("GET", "/health"), 503)
        check_error(*server.json("POST", "/v1/chat/completions", CHAT), 503)
        server.wait_ready()
        threads = [in_background(server)[0]]
        server.process.kill()
        assert server.process.wait(30) == -signal.SIGKILL
        threads[0].join(30)
    assert any(cache.iterdir())
    with started(scripted_model, tmp_path / "log2", *flags, **env) as server:
        status, answer = server.json("POST", "/v1/chat/completions", CHAT)
        assert status == 200 and answer["choices"][0]["message"]["content"] == "Hello, world!"
        assert "warning" not in server.log.read_text().lower()


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path, scripted_model: Path):
    with started(scripted_model, tmp_path / "log", "--gpu-cache-neurons", "3000", ready=False) as server:
        assert server.process.wait(60) == 2
    assert "--gpu-cache-neurons 3000: a layer of this model has 160 neurons" in (tmp_path / "log").read_text()
