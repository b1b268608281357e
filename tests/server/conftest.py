"""One server process with the scripted model for all tests that do not need their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_model import build
from server_process import Server, started

FLAGS = (
    "--gpu-cache-neurons",
    "64",
    "--temperature",
    "1",
    "--top-k",
    "0",
    "--top-p",
    "1",
    "--min-p",
    "0",
    "-c",
    "4096",
)


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "scripted")


@pytest.fixture(scope="session")
def server(scripted_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(scripted_model, tmp_path_factory.mktemp("server") / "log.txt", *FLAGS) as running:
        yield running
