"""Fetching from Hugging Face: a stand-in for the library's calls, and the library against hubs that fail."""

import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from kairox_jax.io import FetchError, resolve_model
from kairox_jax.io.hub import _choose

MODEL = b"GGUF" + bytes(range(200))


class FakeHub:
    """Stands for the library's calls and notes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: list[str], answer: Path) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.files, self.answer = files, answer
        self.error: Exception | None = None
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", self.info)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot)

    def info(self, repo: str, **options: Any) -> SimpleNamespace:
        self.calls.append(("info", {"repo": repo, **options}))
        if self.error is not None:
            raise self.error
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self.files])

    def download(self, repo: str, file: str, **options: Any) -> str:
        self.calls.append(("file", {"repo": repo, "file": file, **options}))
        return str(self.answer)

    def snapshot(self, repo: str, **options: Any) -> str:
        self.calls.append(("folder", {"repo": repo, **options}))
        return str(self.answer)


def test_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "q8.gguf"
    file.write_bytes(MODEL)
    hub = FakeHub(monkeypatch, ["q8.gguf"], file)
    assert resolve_model("org/model:sub/q8.gguf", revision="v1") == file
    assert hub.calls[0] == ("info", {"repo": "org/model", "revision": "v1", "timeout": 5.0})
    assert hub.calls[1:] == [("file", {"repo": "org/model", "file": "sub/q8.gguf", "revision": "v1"})]


def test_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "q8.gguf").write_bytes(MODEL)
    hub = FakeHub(monkeypatch, ["README.md", "q8.gguf"], tmp_path)
    assert resolve_model("org/model", revision="main") == tmp_path / "q8.gguf"
    assert hub.calls[1][1]["allow_patterns"] == ["q8.gguf"] and hub.calls[1][1]["revision"] == "main"


@pytest.mark.parametrize("name", ["org/model", "org/model:q8.gguf"])
@pytest.mark.parametrize("offline", [True, False])
def test_without_a_network_the_cache_is_used(
    name: str, offline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "q8.gguf").write_bytes(MODEL)
    hub = FakeHub(monkeypatch, [], tmp_path / "q8.gguf" if ":" in name else tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    hub.error = ConnectionError("x")
    assert resolve_model(name) == tmp_path / "q8.gguf"
    kind, options = hub.calls[-1]
    assert kind in ("file", "folder") and options["local_files_only"] is True
    assert len(hub.calls) == (1 if offline else 2)


def test_choice() -> None:
    assert "*.safetensors" in _choose("o/r", ["a.gguf", "pytorch_model.bin", "model.safetensors"])
    with pytest.raises(ValueError, match="holds 2 GGUF files: name one, such as o/r:a.gguf"):
        _choose("o/r", ["a.gguf", "b.gguf"])
    with pytest.raises(FetchError, match="o/r holds only PyTorch pickles .*from_pretrained.'o/r'"):
        _choose("o/r", ["pytorch_model.bin"])
    with pytest.raises(FetchError, match="neither safetensors nor GGUF"):
        _choose("o/r", ["README.md"])


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (errors.LocalEntryNotFoundError("x"), "cannot be reached.*download it elsewhere and pass its path"),
        (errors.OfflineModeIsEnabled("x"), "cannot be reached"),
        (ConnectionError("x"), r"cannot be reached.*\(ConnectionError\)"),
        (OSError(28, "No space left on device"), "could not be stored: .*No space left.*set HF_HOME"),
        (errors.HFValidationError("bad"), "no valid repository name"),
        (errors.EntryNotFoundError("x"), "org/model@v2 has no file 'q8.gguf'"),
    ],
)
def test_errors_of_the_library(
    raised: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeHub(monkeypatch, ["q8.gguf"], tmp_path)

    def fail(*_: object, **__: object) -> str:
        raise raised

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises((FetchError, ValueError), match=message) as error:
        resolve_model("org/model:q8.gguf", revision="v2")
    assert "\n" not in str(error.value)


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers every request with the status that its server was given, and notes the token."""

    server: Any

    def do_GET(self) -> None:
        self.server.tokens.append(self.headers.get("Authorization"))
        self.send_response(self.server.status)
        if self.server.code:
            self.send_header("X-Error-Code", self.server.code)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def local_hub() -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.tokens, server.status, server.code = [], 404, ""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(endpoint: str, tmp_path: Path, name: str, **variables: str) -> tuple[str, float]:
    """Resolve a name in a process of its own; return what it printed, and its seconds."""
    code = (
        "import sys, time\nfrom kairox_jax.io import FetchError, resolve_model\nbegin = time.monotonic()\n"
        "try:\n    resolve_model(sys.argv[1], revision='v1')\nexcept FetchError as error:\n"
        "    print(error)\n    print(time.monotonic() - begin)"
    )
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), **variables}
    environment = {key: value for key, value in environment.items() if not key.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", code.replace("\\\n", "\n"), name],
        env=environment,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    *lines, seconds = (done.stderr + done.stdout).splitlines()
    assert len(lines) == 1, lines
    return lines[0], float(seconds)


@pytest.mark.parametrize("name", ["org/model", "org/model:q8.gguf"])
def test_an_unreachable_hub_is_told_at_once(name: str, tmp_path: Path) -> None:
    """One line within seconds; the library alone retries for 25 s with a line each time."""
    line, seconds = ask("http://127.0.0.1:9", tmp_path, name)
    assert line.startswith("org/model@v1") and "cannot be reached: check the network" in line
    assert seconds < 10


def test_offline_mode_asks_nobody(tmp_path: Path, local_hub: Any) -> None:
    endpoint = f"http://127.0.0.1:{local_hub.server_port}"
    line, seconds = ask(endpoint, tmp_path, "org/model", HF_HUB_OFFLINE="1")
    assert "is not in the Hugging Face cache" in line and seconds < 10
    assert local_hub.tokens == []


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", "org/model@v1 is not on Hugging Face, or is private: .*set HF_TOKEN"),
        (404, "RevisionNotFound", "org/model has no revision 'v1'"),
        (403, "GatedRepo", "org/model@v1 is gated: ask for access on its page, then set HF_TOKEN"),
        (503, "", "org/model@v1 is not in the Hugging Face cache and cannot be reached"),
    ],
)
def test_what_the_hub_answers(status: int, code: str, message: str, tmp_path: Path, local_hub: Any) -> None:
    local_hub.status, local_hub.code = status, code
    line, _ = ask(f"http://127.0.0.1:{local_hub.server_port}", tmp_path, "org/model", HF_TOKEN="hf_secret")
    assert line.startswith("org/model") and re.search(message, line), line
    assert local_hub.tokens[-1] == "Bearer hf_secret" and "hf_secret" not in line
