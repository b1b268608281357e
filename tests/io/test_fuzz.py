"""Damaged files, hundreds of each kind: one typed line that names file and field, little memory, no hang."""

import shutil
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import fuzz_cases
import pytest

from kairox_jax.io import FormatError, open_checkpoint

MODELS = Path(__file__).parents[1] / "data/models"
# What Python needs for an error, whatever the file's size.
SLACK_BYTES = 100_000


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def opened(path: Path) -> None:
    """Do all that loading does."""
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        checkpoint.tensor(name)


def assert_refused(
    target: Path, model: Path, cases: Iterable[fuzz_cases.Case], size: int, least: int
) -> None:
    """Write each case to ``target`` and open ``model``; ``size`` is that of the files beside it."""
    count, accepted = 0, []
    for label, data in cases:
        target.write_bytes(data)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            opened(model)
            accepted.append(label)
        except FormatError as error:
            assert str(error).startswith(f"{error.path}: {error.field}: "), label
            assert str(model) in str(error.path) and error.field and "\n" not in str(error), label
            assert len(str(error)) < 700, label
        assert tracemalloc.get_traced_memory()[1] - before < 2 * (len(data) + size) + SLACK_BYTES, label
        count += 1
    assert accepted == [] and count >= least


@pytest.mark.parametrize("magic", [b"GGUF", b"PWRI"])
def test_gguf(magic: bytes, write_llama: Callable[..., Path], tmp_path: Path) -> None:
    good = write_llama(layers=1, dim=32, ffn=32, heads=2, kv_heads=1)
    cases = [
        (label, magic + data[4:] if data.startswith(b"GGUF") else data)
        for label, data in fuzz_cases.gguf_cases(good)
    ]
    target = tmp_path / "damaged.gguf"
    target.write_bytes(magic + good.read_bytes()[4:])
    opened(target)
    assert_refused(target, target, cases, 0, 500)


def test_safetensors(tmp_path: Path) -> None:
    shutil.copy(MODELS / "relu-llama/config.json", tmp_path)
    target = tmp_path / "model.safetensors"
    cases = fuzz_cases.safetensors_cases(MODELS / "relu-llama/model.safetensors")
    assert_refused(target, tmp_path, cases, 0, 500)


def test_config(tmp_path: Path) -> None:
    shutil.copytree(MODELS / "relu-llama", tmp_path, dirs_exist_ok=True)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert_refused(
        tmp_path / "config.json", tmp_path, fuzz_cases.config_cases(tmp_path / "config.json"), size, 150
    )


def test_index(tmp_path: Path) -> None:
    shutil.copytree(MODELS / "sparse-qwen2", tmp_path, dirs_exist_ok=True)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    target = tmp_path / "model.safetensors.index.json"
    assert_refused(target, tmp_path, list(fuzz_cases.index_cases(target)), size, 200)


def test_many_tiny_things_take_little_memory(tmp_path: Path) -> None:
    """Headers that are well formed and ask for as many objects as fit."""
    shutil.copy(MODELS / "relu-llama/config.json", tmp_path)
    lists = b'{"a":[' + b"[]," * 200_000 + b"[]]}"
    objects = b'{"a":{' + b",".join(b'"%d":{}' % i for i in range(60_000)) + b"}}"
    bombs = [
        (name, len(data).to_bytes(8, "little") + data) for name, data in (("[]", lists), ("{}", objects))
    ]
    assert_refused(tmp_path / "model.safetensors", tmp_path, bombs, 0, 2)
    pairs = b"".join(b"\3\0\0\0\0\0\0\0%03x" % i + b"\0\0\0\0\0" for i in range(4097))
    counts = (0).to_bytes(8, "little") + (4097).to_bytes(8, "little")
    bomb = tmp_path / "bomb.gguf"
    assert_refused(bomb, bomb, [("pairs", b"GGUF\3\0\0\0" + counts + pairs)], 0, 1)
