"""Conversions that are broken off, refused or short of disk: nothing half loads, and the next run goes on."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kairox_jax.io import convert as convert_module
from kairox_jax.io import export_gguf, open_checkpoint, orbax_write
from kairox_jax.io.convert import Conversion, convert

MODELS = Path(__file__).parents[1] / "data/models"
KINDS = ("orbax", "gguf")


class Stopped(BaseException):
    """Stands in for the signal that ends a run."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODELS / "relu-llama", tmp_path / "source"))


def run(source: Path, target: Path, **settings: Any) -> list[str]:
    """Convert and return what it said."""
    lines: list[str] = []
    job = Conversion(source=open_checkpoint(source), target=target, **settings)
    convert(job, note=lines.append, report=lambda written, total: None)
    return lines


def count_calls(monkeypatch: pytest.MonkeyPatch, kind: str, *, stop_at: int | None = None) -> list[str]:
    """Count what is written, and stop a run before its n-th part or tensor."""
    module, name = (convert_module, "write_part") if kind == "orbax" else (export_gguf, "_write")
    write, written = getattr(module, name), []

    def counted(*args: Any) -> None:
        if len(written) == stop_at:
            raise Stopped
        write(*args)
        written.append((args[1]).name)

    monkeypatch.setattr(module, name, counted)
    return written


def same_weights(first: Path, second: Path) -> bool:
    ours, theirs = open_checkpoint(first), open_checkpoint(second)
    return all(np.array_equal(ours.tensor(name), theirs.tensor(name)) for name in theirs.names())


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_off_run_goes_on(kind: str, source: Path, tmp_path: Path, monkeypatch) -> None:
    target = tmp_path / f"out.{kind}"
    with monkeypatch.context() as patch:
        before = count_calls(patch, kind, stop_at=3)
        with pytest.raises(Stopped):
            run(source, target, kind=kind)
    assert len(before) == 3 and not target.exists()
    with pytest.raises(ValueError, match="conversion was broken off; run the same `kairox convert` again"):
        open_checkpoint(target)
    with pytest.raises(ValueError, match="unfinished conversion, no model: run the same"):
        open_checkpoint(tmp_path / f"out.{kind}.kairox-partial")
    with monkeypatch.context() as patch:
        after = count_calls(patch, kind)
        assert run(source, target, kind=kind) == ["going on where an earlier run stopped"]
    assert after and not set(before) & set(after)
    assert same_weights(target, source)
    assert sorted(path.name for path in tmp_path.iterdir()) == [target.name, "source"]
    if kind == "gguf":
        run(source, tmp_path / "whole.gguf", kind=kind)
        assert target.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_a_tensor_that_was_cut_off_is_written_again(source: Path, tmp_path: Path, monkeypatch) -> None:
    target = tmp_path / "out.gguf"
    with monkeypatch.context() as patch:
        count_calls(patch, "gguf", stop_at=5)
        with pytest.raises(Stopped):
            run(source, target, kind="gguf")
    half = tmp_path / "out.gguf.kairox-partial/model.gguf"
    os.truncate(half, half.stat().st_size - 100)
    run(source, target, kind="gguf")
    assert same_weights(target, source)


@pytest.mark.parametrize("change", ["source", "settings"])
@pytest.mark.parametrize("kind", KINDS)
def test_another_source_or_setting_starts_anew(
    kind: str, change: str, source: Path, tmp_path: Path, monkeypatch
) -> None:
    target = tmp_path / "out"
    with monkeypatch.context() as patch:
        before = count_calls(patch, kind, stop_at=3)
        with pytest.raises(Stopped):
            run(source, target, kind=kind)
    if change == "source":
        os.utime(source / "model.safetensors", ns=(1, 1))
    after = count_calls(monkeypatch, kind)
    settings = {"quantize": "f16"} if change == "settings" else {}
    lines = run(source, target, kind=kind, **settings)
    assert lines == ["an earlier run had another source or other settings: starting anew"]
    assert set(before) < set(after)


def test_what_exists_is_replaced_only_with_force(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    run(source, target)
    (target / "mine").write_text("kept")
    with pytest.raises(ValueError, match="out exists: give --force to replace it"):
        run(source, target)
    assert (target / "mine").exists()
    run(source, target, quantize="q8_0", force=True)
    assert not (target / "mine").exists()
    assert open_checkpoint(target).packed_format("layers.0.w_up") == "q8_0"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("target", ["source", ".", "source/inside"])
def test_the_source_is_never_the_target(target: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is the source, or holds it, or lies in it"):
        run(source, (tmp_path / target).resolve(), force=True)
    assert open_checkpoint(source).names()


def test_a_full_disk(source: Path, tmp_path: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ValueError, match=r"out needs 0.03 GB, its disk has 0.00 GB left: free some"):
        run(source, tmp_path / "out")


def test_a_disk_that_fills_up_meanwhile(source: Path, tmp_path: Path, monkeypatch) -> None:
    import orbax.checkpoint as ocp

    def full(*args: object, **settings: object) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Error writing x: No space left on device [OS error 28]")

    monkeypatch.setattr(ocp.Checkpointer, "save", full)
    with pytest.raises(ValueError, match="the disk of .*out is full: free some of it and run the same again"):
        run(source, tmp_path / "out")


def test_a_place_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        run(source, tmp_path / "file/out")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_no_whole_blocks(kind: str, write_llama: Callable[..., Path], tmp_path: Path) -> None:
    path = write_llama(dim=48, heads=4, kv_heads=2)
    with pytest.raises(ValueError, match="rows of 48 weights are no whole blocks of 32"):
        run(path, tmp_path / "out", kind=kind, quantize="q8_0")
    assert not (tmp_path / "out.kairox-partial").exists()


def test_a_weight_beyond_float16(source: Path, tmp_path: Path, monkeypatch) -> None:
    from kairox_jax.io.stored_rows import pack_rows

    with pytest.raises(ValueError, match="wq: a weight of 70000 is beyond float16: use --quantize f32"):
        pack_rows(np.full((1, 32), 70000, np.float32), "f16", "wq")
    assert orbax_write.plan_parts(open_checkpoint(source), "f16")
