"""Settings are checked, and the command line makes them from its flags and variables."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from kairox_jax import server as server_package
from kairox_jax.cli import main
from kairox_jax.commands.serve import model_name
from kairox_jax.config import MAX_PARALLEL
from kairox_jax.host import MAX_BATCH
from kairox_jax.server import ServerSettings


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("port", -1, "--port -1"),
        ("port", 65536, "--port 65536"),
        ("api_key", "", "--api-key"),
        ("api_key", "ключ", "--api-key"),
        ("cors_origins", ("example.org",), "--cors-origin 'example.org'"),
        ("cors_origins", ("https://example.org/x",), "--cors-origin"),
        ("max_waiting", 0, "--max-waiting 0"),
        ("max_body_bytes", 0, "--max-body 0"),
        ("timeout_s", math.nan, "--timeout nan"),
        ("grace_s", -1, "--grace -1"),
    ],
)
def test_settings_are_checked(field: str, value: Any, message: str):
    with pytest.raises(ValueError, match=message):
        ServerSettings(model_name="m", **{field: value})


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("127.8.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
    ],
)
def test_only_a_local_server_knows_its_names(host: str, local: bool):
    settings = ServerSettings(model_name="m", host=host, allow_hosts=("Box.Example",))
    names = settings.host_names
    assert settings.is_local is local and (names is not None) is local
    assert names is None or {"localhost", host, "box.example"} <= names


def test_flags_and_variables_make_settings(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    opened: list[Any] = []

    def serve(settings: ServerSettings, open_engine: Any) -> None:
        seen.append(settings)
        open_engine()

    def engine(model: str, **given: Any) -> Any:
        opened.append((model, given))
        return SimpleNamespace(describe=lambda: "a fake")

    monkeypatch.setattr(server_package, "serve", serve)
    monkeypatch.setenv("KAIROX_API_KEY", "sesame")
    monkeypatch.setenv("KAIROX_MAX_WAITING", "3")
    words = "serve -m x/model.gguf --gpu-cache-neurons 3000 --tam-beta 0.90 --tam-threshold 0.35 --anb-enable"
    words += " --host 127.0.0.1 --port 8081 --parallel 4 --seed 9 --top-k 7 --cors-origin https://a.example"
    assert main(words.split(), engine_api=SimpleNamespace(Engine=engine)) == 0
    (settings,) = seen
    assert (settings.model_name, settings.port, settings.api_key) == ("model", 8081, "sesame")
    assert (settings.max_waiting, settings.seed) == (3, 9)
    assert settings.defaults.top_k == 7 and settings.cors_origins == ("https://a.example",)
    ((model, given),) = opened
    placement = given["placement"]
    assert model == "x/model.gguf" and (placement.gpu_cache_neurons, placement.tam_beta) == (3000, 0.9)
    assert placement.policy_name == "guide"  # whose flags these are, be they its defaults


def test_the_command_line_knows_how_many_sequences_a_step_takes():
    assert MAX_PARALLEL == MAX_BATCH


def test_mistakes_are_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]):
    for words, message in (
        (["--tam-beta", "2"], "--tam-beta 2.0 must be in [0, 1)"),
        (["--port", "70000"], "--port 70000"),
        (["--pork", "1"], "did you mean --port?"),
        (["--parallel", "99"], "--parallel: '99': choose 1 to 8"),
        (["--vram-budget", "-5GB"], "--vram-budget: size '-5GB': expected a positive number"),
        (["--timeout", "-1"], "--timeout -1 must be 0 or more seconds"),
        (["--api-key", ""], "--api-key must be"),
    ):
        assert main(["serve", *words]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("/a/b/X-Q4.gguf", "X-Q4"),
        ("org/repo", "repo"),
        ("folder/", "folder"),
    ],
)
def test_the_models_name(model: str, name: str):
    assert model_name(model) == name


def test_the_document_names_every_route():
    service = server_package.Service(ServerSettings(model_name="m"), lambda: pytest.fail("not opened"))
    app: FastAPI = server_package.make_app(service)
    document = json.loads(json.dumps(app.openapi()))
    assert {"/v1/chat/completions", "/v1/completions", "/health", "/metrics"} <= set(document["paths"])
    answers = document["paths"]["/v1/completions"]["post"]["responses"]
    assert "422" not in answers or "HTTPValidationError" not in json.dumps(answers["422"])
