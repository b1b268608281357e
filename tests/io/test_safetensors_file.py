"""Safetensors: agreement with the library that writes them, and a typed error for whatever is malformed."""

import json
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kairox_jax.io import FormatError, open_checkpoint, resolve_model
from kairox_jax.io.safetensors_file import INDEX, SafetensorsFolder
from kairox_jax.io.weights import unpack

MODELS = Path(__file__).parents[1] / "data/models"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def write(folder: Path, header: Any, data: bytes = b"", name: str = "model.safetensors") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A copy of a small checkpoint in one file."""
    return Path(shutil.copytree(MODELS / "relu-llama", tmp_path / "relu-llama"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A copy of a small checkpoint in five shards."""
    return Path(shutil.copytree(MODELS / "sparse-qwen2", tmp_path / "sparse-qwen2"))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_agrees_with_the_library(dtype: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = {
        "a": rng.normal(size=(3, 5)),
        "b.weight": rng.normal(size=(7,)),
        "c": rng.normal(size=(2, 3, 4)),
    }
    tensors = {name: values.astype(dtype) for name, values in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    folder = SafetensorsFolder(tmp_path)
    assert set(folder.shapes) == set(tensors)
    for name, want in tensors.items():
        raw, fmt = folder.raw(name)
        assert folder.shapes[name] == want.shape and not raw.flags.writeable and not raw.flags.owndata
        np.testing.assert_array_equal(unpack(raw, fmt), want.astype(np.float32))
    assert folder.num_bytes == sum(values.nbytes for values in tensors.values())


def test_rows_in_the_files_own_format() -> None:
    checkpoint = open_checkpoint(MODELS / "prosparse-llama")
    up = checkpoint.packed("layers.1.w_up")
    assert up is not None and up.format == "f16" and not up.data.flags.owndata
    np.testing.assert_array_equal(up.dequantize(), checkpoint.tensor("layers.1.w_up"))
    down = checkpoint.packed("layers.1.w_down")
    assert down is not None and down.format == "f16"
    np.testing.assert_array_equal(down.dequantize(), checkpoint.tensor("layers.1.w_down"))
    fused = open_checkpoint(MODELS / "relu-falcon")
    k = fused.packed("layers.0.wk")
    assert k is not None and k.shape == (32, 64) == fused.shape("layers.0.wk")
    np.testing.assert_array_equal(k.dequantize(), fused.tensor("layers.0.wk"))


def good() -> dict[str, Any]:
    return {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "F16", "shape": [4], "data_offsets": [16, 24]},
    }


def changed(name: str, key: str, value: Any) -> dict[str, Any]:
    header = good()
    header[name][key] = value
    return header


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\xff\xfe{}", "JSON: broken"),
        (b"[1]", "expected an object, not a list"),
        (b"{" * 20_000, "header: describes more than 16384 tensors"),
        (b"{" * 5000, "JSON: broken"),
        (b'{"a": ' + b"[" * 20_000, "JSON: broken"),
        (b'{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 16]}}' % (b"9" * 5000), "JSON: broken"),
        (b'{"a": {}, "a": {}}', "a: the key occurs twice"),
        ({"a": 3}, "a: expected dtype, shape and data_offsets"),
        (changed("a", "dtype", "F3"), "a.dtype: 'F3' is not one of"),
        (changed("a", "dtype", ["F32"]), "a.dtype: .* is not one of"),
        (changed("a", "shape", [2, -2]), "a.shape: .* whole numbers"),
        (changed("a", "shape", [2, True]), "a.shape: .* whole numbers"),
        (changed("a", "shape", [2, 2.0]), "a.shape: .* whole numbers"),
        (changed("a", "shape", [1] * 1000), "a.shape: .* at most 8"),
        (changed("a", "shape", [2**62, 2**62]), "a.data_offsets: .* is not the size of F32"),
        (changed("a", "data_offsets", [16, 0]), "a.data_offsets: .* a begin and an end"),
        (changed("a", "data_offsets", [0]), "a.data_offsets: .* a begin and an end"),
        (changed("b", "data_offsets", [0, 8]), "overlaps|leaves a gap"),
        (changed("b", "data_offsets", [24, 32]), "b.data_offsets: 24 leaves a gap before it"),
        (
            changed("b", "shape", [40]) | {"b": {"dtype": "F16", "shape": [40], "data_offsets": [16, 96]}},
            "b: .*cut off",
        ),
        ({"a": good()["a"]}, "header: describes 16 bytes of data, the file has 24"),
    ],
)
def test_refuses_headers(header: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message) as error:
        SafetensorsFolder(write(tmp_path, header, bytes(24)))
    assert str(tmp_path / "model.safetensors") in str(error.value) and "\n" not in str(error.value)


def test_length_of_the_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for length, message in (
        (2**63, "this is no safetensors file"),
        (1000, "needs 1008 bytes, the file has 18"),
    ):
        path.write_bytes(struct.pack("<Q", length) + bytes(10))
        with pytest.raises(FormatError, match=message):
            SafetensorsFolder(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(FormatError, match="the file has 0 bytes: it is cut off"):
        SafetensorsFolder(tmp_path)


def test_cut_off_in_the_middle(llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(FormatError, match=f"{path}: .*it is cut off, fetch it again"):
        open_checkpoint(llama)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_git_lfs_pointer(name: str, llama: Path) -> None:
    (llama / name).write_bytes(LFS)
    with pytest.raises(FormatError, match=f"{name}: .*this is a Git-LFS pointer, not the .*`git lfs pull`"):
        open_checkpoint(llama)


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00003-of-00005.safetensors").unlink()
    with pytest.raises(FormatError, match=f"{INDEX}: .*model-00003-of-00005.safetensors, which is not there"):
        open_checkpoint(sharded)


def test_missing_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(FormatError, match=f"{INDEX}: missing, but there are 5 shards"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("../model.safetensors", "is no safetensors file of this folder"),
        ("config.json", "is no safetensors file of this folder"),
        ("model-00001-of-00005.safetensors", "norm.weight: the index says it is in model-00001"),
        (7, "'7' is no safetensors file"),
    ],
)
def test_index_that_is_wrong(shard: Any, message: str, sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(FormatError, match=message):
        open_checkpoint(sharded)


def test_tensor_in_two_shards(sharded: Path) -> None:
    shutil.copy(sharded / "model-00001-of-00005.safetensors", sharded / "model-00002-of-00005.safetensors")
    with pytest.raises(FormatError, match="embed_tokens.weight: the tensor occurs in model-00001-of-00005"):
        open_checkpoint(sharded)


def test_missing_tensor_and_wrong_shape(sharded: Path) -> None:
    config = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(
        FormatError, match=r"model.layers.2.self_attn.q_proj.weight: missing|model.layers.2.*missing"
    ):
        open_checkpoint(sharded)
    (sharded / "config.json").write_text(json.dumps(config | {"intermediate_size": 161}))
    with pytest.raises(FormatError, match=r"model-0000.*shape \(160, 64\); the config asks for \(161, 64\)"):
        open_checkpoint(sharded)
    (sharded / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2**30}))
    with pytest.raises(FormatError, match="num_hidden_layers: 1073741824: the files hold fewer"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_refuses_weights_that_are_no_numbers(value: float, llama: Path) -> None:
    path = llama / "model.safetensors"
    needle = open_checkpoint(llama).tensor("layers.1.w_up")[0, :1].tobytes()
    data = path.read_bytes()
    at = data.index(needle)
    path.write_bytes(data[:at] + np.float32(value).tobytes() + data[at + 4 :])
    with pytest.raises(
        FormatError, match="model.safetensors: model.layers.1.mlp.up_proj.weight: 1 of 10240 values"
    ):
        open_checkpoint(llama).tensor("layers.1.w_up")


def test_pickles_are_not_read(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(FormatError, match="pickles .*save_pretrained"):
        open_checkpoint(llama)
    (llama / "pytorch_model.bin").unlink()
    with pytest.raises(FormatError, match="holds no weights"):
        open_checkpoint(llama)


def test_unsupported_type_is_refused_when_read(tmp_path: Path) -> None:
    folder = SafetensorsFolder(
        write(tmp_path, {"a": {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]}}, bytes(4))
    )
    with pytest.raises(FormatError, match="a: type I8, shape .* expected F32, F16 or BF16"):
        folder.raw("a")


def test_a_file_in_place_of_its_folder() -> None:
    with pytest.raises(ValueError, match="give the folder, which holds config.json"):
        resolve_model(MODELS / "relu-llama/model.safetensors")
    assert resolve_model(MODELS / "relu-llama") == MODELS / "relu-llama"


def test_without_an_output_matrix(llama: Path) -> None:
    """Tied, although the config does not say so."""
    folder = SafetensorsFolder(llama)
    kept = {name: unpack(*folder.raw(name)) for name in folder.shapes if name != "lm_head.weight"}
    (llama / "model.safetensors").unlink()
    save_file(kept, llama / "model.safetensors")
    checkpoint = open_checkpoint(llama)
    assert checkpoint.config.tie_embeddings and not checkpoint.has("output")


def test_fuzzed_files(tmp_path: Path) -> None:
    """Cut files, changed bytes, changed numbers: each loads or gives a FormatError, and allocates little."""
    source = MODELS / "relu-llama"
    shutil.copy(source / "config.json", tmp_path)
    original = (source / "model.safetensors").read_bytes()
    header_end = 8 + struct.unpack_from("<Q", original)[0]
    rng = np.random.default_rng(5)
    path, refused = tmp_path / "model.safetensors", 0
    digits = [i for i in range(8, header_end) if original[i : i + 1].isdigit()]
    tracemalloc.start()
    for i in range(240):
        data = bytearray(original)
        if i % 3 == 0:
            data = data[: rng.integers(0, len(data) if i % 2 else header_end)]
        elif i % 3 == 1:
            for at in rng.integers(0, header_end, size=rng.integers(1, 4)):
                data[at] = rng.integers(256)
        else:
            data[rng.choice(digits)] = ord("0") + int(rng.integers(10))
        path.write_bytes(data)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            checkpoint = open_checkpoint(tmp_path)
            for name in checkpoint.names():
                checkpoint.tensor(name)
        except FormatError as error:
            assert str(tmp_path) in str(error)
            refused += 1
        assert tracemalloc.get_traced_memory()[1] - before < 2 * len(original)
    tracemalloc.stop()
    assert refused > 120
