"""PowerInfer's activation folders: numeric order, torch's own layout, and nothing but tensors."""

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.powerinfer_activations import activation_files, read_activations, read_tensor


class Global:
    """Pickles as a global name, as torch's functions and storages do."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class Call:
    def __init__(self, function: Global, arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments


class Persistent:
    def __init__(self, pid: tuple[Any, ...]) -> None:
        self.pid = pid


def encode(value: Any) -> bytes:
    """Write protocol 2 by hand: an independent account of what `torch.save` writes for one tensor."""
    match value:
        case Global():
            return b"c" + f"{value.module}\n{value.name}\n".encode()
        case Call():
            return encode(value.function) + encode(value.arguments) + b"R"
        case Persistent():
            return encode(value.pid) + b"Q"
        case tuple():
            return b"(" + b"".join(map(encode, value)) + b"t"
        case _:
            return pickle.dumps(value, 2)[2:-1]


STORAGE = {"<i8": "LongStorage", "<f4": "FloatStorage", "<f2": "HalfStorage", "<f8": "DoubleStorage"}


def write(path: Path, values: np.ndarray, *, inner: Any = None, **changes: Any) -> None:
    storage = Global("torch", changes.get("storage") or STORAGE[values.dtype.str])
    pid = Persistent(("storage", storage, "0", "cpu", changes.get("count", values.size)))
    strides = changes.get("strides", tuple(s // values.itemsize for s in values.strides))
    empty = Call(Global("collections", "OrderedDict"), ())
    rebuild = Global("torch._utils", "_rebuild_tensor_v2")
    tensor = Call(rebuild, (pid, 0, changes.get("shape", values.shape), strides, False, empty))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("activation/data.pkl", b"\x80\x02" + encode(inner or tensor) + b".")
        archive.writestr("activation/byteorder", changes.get("order", "little"))
        archive.writestr("activation/data/0", values.tobytes())
        archive.writestr("activation/version", "3\n")


def test_layers_come_in_numeric_order(tmp_path: Path) -> None:
    for layer in range(12):
        write(tmp_path / f"activation_{layer}.pt", np.array([layer, 5, 24], "<i8"))
    (tmp_path / "README.md").write_text("beside the files")
    assert [file.name for file in activation_files(tmp_path)] == [f"activation_{i}.pt" for i in range(12)]
    frequency, relative = read_activations(tmp_path)
    assert relative and frequency.dtype == np.float32
    np.testing.assert_allclose(frequency[:, 0], np.arange(12) / 24, rtol=1e-6)
    np.testing.assert_allclose(frequency[:, 2], 1)


def test_shares_stay_as_they_are(tmp_path: Path) -> None:
    write(tmp_path / "activation_0.pt", np.array([0.25, 0.5], "<f4"))
    frequency, relative = read_activations(tmp_path)
    assert not relative
    np.testing.assert_array_equal(frequency, [[0.25, 0.5]])


@pytest.mark.parametrize("dtype", list(STORAGE))
def test_reads_what_torch_writes(tmp_path: Path, dtype: str) -> None:
    values = np.arange(6, dtype=dtype).reshape(2, 3)
    write(tmp_path / "t.pt", values)
    np.testing.assert_array_equal(read_tensor(tmp_path / "t.pt"), values)


def test_bfloat16_is_widened(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 3.0], np.float32)
    halves = (values.view(np.uint32) >> 16).astype("<u2")
    write(tmp_path / "t.pt", halves, storage="BFloat16Storage")
    np.testing.assert_array_equal(read_tensor(tmp_path / "t.pt"), values)


def test_nothing_but_tensors_is_unpickled(tmp_path: Path) -> None:
    path, victim = tmp_path / "activation_0.pt", tmp_path / "victim"
    values = np.ones(3, "<f4")
    evil = Call(Global("os", "mkdir"), (str(victim),))
    for inner, message in (
        (evil, "os.mkdir"),
        (Call(Global("builtins", "eval"), ("1",)), "builtins.eval"),
        (Call(Global("torch.nn.parameter", "Parameter"), ()), "torch.nn.parameter.Parameter"),
        (OrderedDict(a=1), "it holds a OrderedDict"),
        (Persistent(("module", Global("torch", "FloatStorage"), "0", "cpu", 3)), "other than a storage"),
    ):
        write(path, values, inner=inner)
        with pytest.raises(ValueError, match=f"not one plain tensor, refused: .*{message}"):
            read_tensor(path)
    assert not victim.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 4}, "12 bytes for 4 numbers"),
        ({"shape": (4,), "strides": (1,)}, "beyond its storage"),
        ({"strides": (2,)}, "not those of a contiguous tensor"),
        ({"order": "big"}, "little-endian"),
        ({"storage": "QInt8Storage"}, "torch.QInt8Storage"),
    ],
)
def test_damaged_tensors_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path / "t.pt", np.ones(3, "<f4"), **changes)
    with pytest.raises(ValueError, match=message):
        read_tensor(tmp_path / "t.pt")


def test_wrong_folders_take_one_line(tmp_path: Path) -> None:
    def fails(message: str) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            read_activations(tmp_path)
        assert "\n" not in str(caught.value)

    with pytest.raises(ValueError, match="is no folder"):
        read_activations(tmp_path / "none")
    fails("holds no activation_0.pt")
    write(tmp_path / "activation_0.pt", np.array([1, 2], "<i8"))
    write(tmp_path / "activation_2.pt", np.array([1, 2], "<i8"))
    fails("lacks activation_1.pt")
    write(tmp_path / "activation_1.pt", np.array([1, 2, 3], "<i8"))
    fails("has 3 neurons, layer 0 has 2")
    write(tmp_path / "activation_1.pt", np.array([[1, 2]], "<i8"))
    fails("one number a neuron")
    write(tmp_path / "activation_1.pt", np.array([1, -2], "<i8"))
    fails("negative")
    (tmp_path / "activation_1.pt").write_bytes(pickle.dumps([1, 2]))
    fails("no torch file of version 1.6")
    for layer in range(3):
        write(tmp_path / f"activation_{layer}.pt", np.zeros(2, "<i8"))
    fails("every count is zero")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("other.txt", "no tensor")
    (tmp_path / "activation_1.pt").write_bytes(buffer.getvalue())
    fails("holds no data.pkl")
