"""A real `kairox serve` process, and a plain HTTP client for what the official clients would not send."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_S, STOP_S = 120, 30


@dataclass
class Server:
    """A running server.

    Attributes:
        process: of the server.
        port: where it listens.
        log: its standard error.
    """

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> tuple[int, dict[str, str], bytes]:
        """Send one request; a body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            sent = {"Content-Type": "application/json"} if data is not None else {}
            connection.request(method, path, data, {**sent, **(headers or {})})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def json(self, method: str, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        """Send one request and return the status and the answer's JSON."""
        status, _, data = self.request(method, path, body, **more)
        return status, json.loads(data)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Stream an answer and return its events; ``[DONE]`` is a text."""
        status, headers, data = self.request("POST", path, {**body, "stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), data
        lines = data.decode().split("\n\n")
        assert lines.pop() == "" and all(line.startswith("data: ") for line in lines)
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]

    def leave(self, path: str, body: bytes, after_bytes: int, wait_s: float = 0.0, head: str = "") -> None:
        """Send a request, read some of the answer, wait, and close the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            head += (
                f"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall(f"POST {path} HTTP/1.1\r\n{head}".encode() + body)
            got = b""
            while len(got) < after_bytes:
                got += connection.recv(4096)
            time.sleep(wait_s)

    def wait_ready(self) -> None:
        """Wait until the model is loaded."""
        end = time.monotonic() + START_S
        while self.json("GET", "/health")[0] != 200:
            assert time.monotonic() < end and self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)

    def idle(self) -> None:
        """Wait until nothing runs or waits."""
        end = time.monotonic() + 60
        while (live := self.json("GET", "/live?since=0")[1])["active"] or live["waiting"]:
            assert time.monotonic() < end, live
            time.sleep(0.002)


@contextmanager
def started(model: Path | str, log: Path, *flags: str, ready: bool = True, **env: str) -> Iterator[Server]:
    """Start a server on a free port and end it afterwards."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KAIROX_")}
    command = [sys.executable, "-m", "kairox_jax.cli", "serve", "-m", str(model), "--port", "0", *flags]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, cwd=ROOT, stderr=stream, env={**clean, **env})
    try:
        server = Server(process, _port(process, log), log)
        if ready:
            server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    end = time.monotonic() + START_S
    while not (found := re.search(r"listening on http://[^:]+:(\d+)", log.read_text())):
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    return int(found[1])


def check_error(status: int, answer: dict, want: int) -> None:
    """Check an answer's status, and that its error has OpenAI's shape."""
    assert status == want
    assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"] and "\n" not in answer["error"]["message"]
