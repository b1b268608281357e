"""Files that must be refused: every kind of damage to a header, at each of its places; the same on every run."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Case = tuple[str, bytes]


def truncations(good: bytes, header_end: int, count: int) -> Iterator[Case]:
    """Cut a file in its header, and in its data."""
    for at in np.unique(np.linspace(0, header_end, count, dtype=int)):
        yield f"cut in the header at {at}", good[:at]
    for at in np.unique(np.linspace(header_end, len(good) - 1, count // 4, dtype=int)):
        yield f"cut in the data at {at}", good[:at]


def replace(good: bytes, at: int, new: bytes) -> bytes:
    return good[:at] + new + good[at + len(new) :]


def gguf_cases(path: Path) -> Iterator[Case]:
    """Damage a good GGUF file: counts, each metadata pair, each line of the tensor table."""
    good, reader = path.read_bytes(), gguf.GGUFReader(path)
    yield from truncations(good, reader.data_offset, 160)
    yield from counts_and_magic(good)
    required = ("block_count", "embedding_length", "feed_forward_length", "head_count", "rms_epsilon")
    for field in reader.fields.values():
        if field.name.startswith("GGUF."):
            continue
        at, name = field.offset, field.name.encode()
        kind = at + 8 + len(name)
        yield f"{field.name}: no name", replace(good, at, struct.pack("<Q", 0))
        yield f"{field.name}: name of 2**60 bytes", replace(good, at, struct.pack("<Q", 2**60))
        yield f"{field.name}: name of 60000 bytes", replace(good, at, struct.pack("<Q", 60000 + len(good)))
        yield f"{field.name}: name without text", replace(good, at + 8, b"\xff\xfe")
        for wrong in (13, 255, 2**32 - 1):
            yield f"{field.name}: type {wrong}", replace(good, kind, struct.pack("<I", wrong))
        if field.types[0] == gguf.GGUFValueType.STRING:
            yield f"{field.name}: text of 2**62", replace(good, kind + 4, struct.pack("<Q", 2**62))
        elif field.types[0] == gguf.GGUFValueType.ARRAY:
            yield f"{field.name}: array of arrays", replace(good, kind + 4, struct.pack("<I", 9))
            for count in (2**31, 2**63, 2**64 - 1):
                yield f"{field.name}: {count} elements", replace(good, kind + 8, struct.pack("<Q", count))
        elif field.name.endswith(required):
            yield f"{field.name}: 0", replace(good, kind + 4, bytes(4))
            yield f"{field.name}: largest", replace(good, kind + 4, b"\xff\xff\xff\xff")
        if field.name.endswith(required) or field.name == "general.architecture":
            yield f"{field.name}: missing", replace(good, at + 8, b"x")
    for tensor in reader.tensors:
        yield from tensor_cases(good, tensor)


def counts_and_magic(good: bytes) -> Iterator[Case]:
    for magic in (b"GGML", b"GGJT", b"PWRI"[::-1], b"\0\0\0\0", b"PK\3\4", b"vers"):
        yield f"magic {magic!r}", replace(good, 0, magic)
    for version in (0, 1, 4, 2**31, 3 << 24):
        yield f"version {version}", replace(good, 4, struct.pack("<I", version))
    tensors, fields = struct.unpack_from("<QQ", good, 8)
    for at, name, right in ((8, "tensors", tensors), (16, "fields", fields)):
        for wrong in (0, right - 1, right + 1, 2**20, 2**32, 2**63, 2**64 - 1):
            yield f"{wrong} {name}", replace(good, at, struct.pack("<Q", wrong))


def tensor_cases(good: bytes, tensor: gguf.ReaderTensor) -> Iterator[Case]:
    at, name = tensor.field.offset, tensor.name.encode()
    dims = at + 8 + len(name) + 4
    kind = dims + 8 * len(tensor.shape)
    for wrong in (0, 5, 1_000_000, 2**32 - 1):
        yield f"{tensor.name}: {wrong} dimensions", replace(good, dims - 4, struct.pack("<I", wrong))
    for wrong in (0, 2**32, 2**62, 2**64 - 1):
        yield f"{tensor.name}: dimension {wrong}", replace(good, dims, struct.pack("<Q", wrong))
    for wrong in (3000, 4, 16, 255):
        yield f"{tensor.name}: type {wrong}", replace(good, kind, struct.pack("<I", wrong))
    for wrong in (1, 2**40, 2**63):
        yield f"{tensor.name}: offset {wrong}", replace(good, kind + 4, struct.pack("<Q", wrong))
    yield f"{tensor.name}: another name", replace(good, at + 8, b"x")
    yield f"{tensor.name}: no name", replace(good, at, struct.pack("<Q", 0))


def safetensors_cases(path: Path) -> Iterator[Case]:
    """Damage a good safetensors file: its length, its text, and each tensor's entry."""
    good = path.read_bytes()
    (length,) = struct.unpack_from("<Q", good)
    yield from truncations(good, 8 + length, 200)
    for wrong in (0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1):
        yield f"header of {wrong} bytes", replace(good, 0, struct.pack("<Q", wrong))
    for at in range(8, 8 + length, max(1, length // 40)):
        yield f"byte {at} is no text", replace(good, at, b"\xff")
    header = json.loads(good[8 : 8 + length])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        for key, wrong in entry_damage(entry):
            changed = {key_: value for key_, value in entry.items() if key_ != key}
            damaged = header | {name: changed | ({} if wrong is None else {key: wrong})}
            yield f"{name}.{key}: {str(wrong)[:40]}", packed(damaged, good[8 + length :])
        yield f"{name}: no object", packed(header | {name: [1]}, good[8 + length :])


def entry_damage(entry: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    begin, end = entry["data_offsets"]
    for wrong in (None, "F99", 7, [], "I64"):
        yield "dtype", wrong
    for wrong in (None, "x", [-1], [1.5], [2**62, 2**62], [1] * 99, [True], {}):
        yield "shape", wrong
    for wrong in (
        None,
        [end, begin],
        [begin + 4, end + 4],
        [begin, end - 1],
        [0, 2**62],
        [begin],
        "x",
        [-4, end],
    ):
        yield "data_offsets", wrong


def packed(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def config_cases(path: Path) -> Iterator[Case]:
    """Damage ``config.json``: cut it, and give each key that is read what it cannot be."""
    good = path.read_bytes().rstrip()
    for at in np.unique(np.linspace(0, len(good) - 1, 60, dtype=int)):
        yield f"cut at {at}", good[:at]
    config = json.loads(good)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for key in (*sizes, "num_key_value_heads", "head_dim", "max_position_embeddings"):
        for wrong in (0, -1, 1.5, "2", True, [2], {}, 10**30, 2**31):
            yield f"{key}: {wrong}", json.dumps(config | {key: wrong}).encode()
    for key in sizes:
        yield f"{key}: missing", json.dumps({k: v for k, v in config.items() if k != key}).encode()
    for key, values in {
        "rms_norm_eps": (0, -1.0, "x", [], float("nan"), 10**400),
        "hidden_act": ("gelu", 3, [], ""),
        "model_type": ("gemma", 3, [], None, "mixtral"),
        "tie_word_embeddings": ("x", 1, []),
        "attention_bias": ("x", 1, True),
        "mlp_bias": (True, "x"),
        "bos_token_id": (1.5, "x", []),
        "eos_token_id": ("x", [1, "x"], -1, {}, True),
        "rope_parameters": ({"rope_type": "yarn"}, "x", [], {"rope_theta": "x"}, {"rope_theta": -1}, 3),
        "rope_scaling": ({"type": "dynamic", "factor": 2}, {"type": "linear"}),
        "quantization_config": ({"bits": 4},),
    }.items():
        for wrong in values:
            yield f"{key}: {str(wrong)[:40]}", json.dumps(config | {key: wrong}).encode()


def index_cases(path: Path) -> Iterator[Case]:
    """Damage the index of shards."""
    good = path.read_bytes().rstrip()
    for at in np.unique(np.linspace(0, len(good) - 1, 40, dtype=int)):
        yield f"cut at {at}", good[:at]
    index = json.loads(good)
    names = index["weight_map"]
    for wrong in (None, [], {}, "x", 3):
        yield f"weight_map: {wrong}", json.dumps(index | {"weight_map": wrong}).encode()
    for name in names:
        for wrong in (None, 3, [], "gone.safetensors", "../x.safetensors", "/x.safetensors", "model.bin", ""):
            yield f"{name}: {wrong}", json.dumps({"weight_map": names | {name: wrong}}).encode()
    yield (
        "a tensor that is nowhere",
        json.dumps({"weight_map": names | {"x": next(iter(names.values()))}}).encode(),
    )
