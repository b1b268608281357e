"""The GGUF container: agreement with the gguf library, and a typed error for whatever is malformed."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from kairox_jax.io import FormatError, open_checkpoint
from kairox_jax.io.gguf_file import GgufFile

U32, U64, STRING, ARRAY = 4, 10, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(*, fields: bytes = b"", num_fields: int = 0, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields) + fields + tensors


def tensor(
    dims: list[int], *, name: bytes = b"w", num_dims: int | None = None, kind: int = 0, offset: int = 0
):
    count = len(dims) if num_dims is None else num_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def test_agrees_with_the_library(write_llama: Callable[..., Path]) -> None:
    types = {
        "blk.0.ffn_up.weight": gguf.GGMLQuantizationType.Q4_1,
        "token_embd.weight": gguf.GGMLQuantizationType.F16,
    }
    path = write_llama(types=types)
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for want in theirs.tensors:
        raw, fmt = ours.raw(want.name)
        assert fmt == want.tensor_type.name.lower()
        assert ours.shapes[want.name] == tuple(reversed(want.shape.tolist()))
        np.testing.assert_array_equal(raw.reshape(-1), want.data.reshape(-1).view(np.uint8))
        assert not raw.flags.writeable
    for key, value in ours.fields.items():
        assert (value if isinstance(value, str) else np.asarray(value).tolist()) == theirs.fields[
            key
        ].contents()
    assert len(ours.fields) == len(theirs.fields) - 3  # the reader adds version and counts


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "shorter than a GGUF header", id="empty"),
        pytest.param(b"GGML" + bytes(60), "magic: .*no GGUF file", id="magic"),
        pytest.param(b"PWRI" + struct.pack("<IQQ", 7, 0, 0), "version: 7", id="powerinfer"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\n", "Git-LFS pointer", id="lfs"),
        pytest.param(b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version: 1", id="version"),
        pytest.param(b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version: .*big-endian", id="big-endian"),
        pytest.param(header(num_tensors=2**63), "tensor_count: .*more than the file", id="tensor-count"),
        pytest.param(header(num_fields=2**40), "kv_count: .*more than the file", id="kv-count"),
        pytest.param(
            header(tensors=tensor([4, 0]), num_tensors=1) + bytes(64),
            r"w.dims: \[4, 0\] holds a zero",
            id="zero-dim",
        ),
        pytest.param(
            header(fields=text(b"") + struct.pack("<II", U32, 1) + bytes(64), num_fields=1),
            "key 0: an empty name",
            id="empty-key",
        ),
        pytest.param(
            header(tensors=tensor([4], num_dims=1_000_000), num_tensors=1) + bytes(64),
            "w.n_dims: 1000000; expected 1 to 4",
            id="dims-million",
        ),
        pytest.param(
            header(tensors=tensor([4], num_dims=0xFFFFFFFF), num_tensors=1) + bytes(64),
            "w.n_dims: 4294967295; expected 1 to 4",
            id="dims-max",
        ),
        pytest.param(
            header(tensors=tensor([32], kind=200), num_tensors=1) + bytes(64), "w.type: 200 is not", id="type"
        ),
        pytest.param(
            header(tensors=tensor([32], kind=16), num_tensors=1) + bytes(64),
            "w.type: IQ2_XXS is not",
            id="named-type",
        ),
        pytest.param(
            header(tensors=tensor([33], kind=8), num_tensors=1) + bytes(64),
            "no whole Q8_0 blocks",
            id="blocks",
        ),
        pytest.param(
            header(tensors=tensor([2**62, 2**62]), num_tensors=1) + bytes(64),
            "w: ends at byte .*cut off",
            id="huge",
        ),
        pytest.param(
            header(tensors=tensor([4], offset=5), num_tensors=1) + bytes(64),
            "w: offset 5 is no multiple",
            id="offset",
        ),
        pytest.param(
            header(tensors=tensor([4]) + tensor([4]), num_tensors=2) + bytes(64),
            "w: the tensor occurs twice",
            id="twice",
        ),
        pytest.param(
            header(tensors=tensor([16]) + tensor([4], name=b"v", offset=32), num_tensors=2) + bytes(128),
            "v: its data overlaps that of w",
            id="overlap",
        ),
        pytest.param(
            header(fields=text(b"k") + struct.pack("<IIQ", ARRAY, STRING, 2**60), num_fields=1),
            "k: an array of .* more than the file",
            id="array",
        ),
        pytest.param(
            header(fields=text(b"k") + struct.pack("<IIQ", ARRAY, U64, 2**60), num_fields=1),
            "k: asks for .* bytes",
            id="number-array",
        ),
        pytest.param(
            header(fields=text(b"k") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + bytes(16), num_fields=1),
            "k: an array of value type 9",
            id="nested",
        ),
        pytest.param(
            header(fields=text(b"k") + struct.pack("<I", STRING) + text(b"\xff\xfe"), num_fields=1),
            "k: the text is no valid UTF-8",
            id="utf-8",
        ),
        pytest.param(
            header(fields=text(b"k") + struct.pack("<II", 77, 0), num_fields=1),
            "k: unknown value type 77",
            id="kind",
        ),
        pytest.param(
            header(fields=text(b"general.alignment") + struct.pack("<II", U32, 0), num_fields=1),
            "general.alignment: 0 is no power",
            id="alignment",
        ),
    ],
)
def test_refuses(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=message) as error:
        GgufFile(path)
    assert str(path) in str(error.value)


def test_says_which_type_is_missing_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(header(tensors=tensor([256], kind=10), num_tensors=1) + bytes(256))
    with pytest.raises(FormatError, match="Q2_K is not supported; requantize to one of F32, F16"):
        GgufFile(path)


def opens_or_says_why(path: Path) -> bool:
    """Open everything that a load reads; True when refused."""
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names():
            checkpoint.tensor(name)
        checkpoint.tokenizer()
    except FormatError as error:
        assert str(path) in str(error)
        return True
    return False


def test_fuzzed_headers(write_llama: Callable[..., Path], tmp_path: Path) -> None:
    """Cut files, changed bytes and words: each loads or gives a FormatError, and allocates little."""
    good = write_llama(layers=1, dim=32, ffn=32, heads=2, kv_heads=1).read_bytes()
    header_end = good.index(b"blk.0.ffn_down.weight") + 64
    rng = np.random.default_rng(20)
    words = [0, 1, 2, 3, 0x7F, 0xFF, 2**16, 2**31 - 1, 2**32 - 1, 2**62, 2**64 - 1]
    path, refused, tried = tmp_path / "fuzzed.gguf", 0, 0
    tracemalloc.start()
    for i in range(240):
        data = bytearray(good)
        if i % 3 == 0:
            data = data[: rng.integers(0, len(data) if i % 2 else header_end)]
        elif i % 3 == 1:
            for at in rng.integers(0, header_end, size=rng.integers(1, 4)):
                data[at] = rng.integers(256)
        else:
            at, width = int(rng.integers(4, header_end)), int(rng.choice([4, 8]))
            data[at : at + width] = (int(rng.choice(np.array(words, object))) & (256**width - 1)).to_bytes(
                width, "little"
            )
        path.write_bytes(data)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        refused += opens_or_says_why(path)
        tried += 1
        assert tracemalloc.get_traced_memory()[1] - before < 2 * len(good) + 200_000
    tracemalloc.stop()
    assert tried == 240 and refused > 120


@pytest.mark.model
def test_default_model_opens_fast(default_model: Path) -> None:
    file = GgufFile(default_model)
    assert len(file.tensors) == 272
    assert file.shapes["token_embd.weight"] == (49152, 576)
    assert len(file.fields["tokenizer.ggml.tokens"]) == 49152
    assert file.fields["tokenizer.ggml.tokens"][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
