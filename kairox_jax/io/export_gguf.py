"""Write a checkpoint as one GGUF file, tensor by tensor; what GGUF has no word for goes into ``kairox.*`` keys.

llama.cpp refuses a file with tensors that it does not know, and ignores keys that it does not know: so
thresholds, profile and predictors are arrays in the metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kairox_jax.config import ModelConfig
from kairox_jax.io.checkpoint import Checkpoint
from kairox_jax.io.export_tensors import OutTensor, gguf_architecture, out_tensors
from kairox_jax.io.export_tokenizer import tokenizer_fields
from kairox_jax.io.gguf_file import GgufFile
from kairox_jax.io.gguf_sparsity import sparsity_fields
from kairox_jax.io.sparsity import Sparsity, fingerprint
from kairox_jax.io.tokenizer_files import MetadataWriter

VERSION = 1
ALIGNMENT = 32
_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "bf16": 32}


def gguf_fields(
    checkpoint: Checkpoint, arch: str, sparsity: Sparsity | None, predictors: bytes | None
) -> dict[str, Any]:
    """Return an export's metadata.

    Args:
        checkpoint: the source.
        arch: as ``gguf_architecture`` gives it.
        sparsity: thresholds and profile.
        predictors: the bytes of ``predictors.safetensors``.

    Raises:
        ValueError: the tokenizer has no GGUF form.
    """
    config = checkpoint.config
    fields = _general(checkpoint) | {f"{arch}.{key}": value for key, value in _sizes(config, arch).items()}
    fields |= tokenizer_fields(checkpoint, arch)
    fields |= {
        "kairox.version": VERSION,
        "kairox.fingerprint": fingerprint(checkpoint),
        "kairox.family": config.family,
        "kairox.activation": config.activation,
    }
    if config.activation == "fatrelu":
        fields["kairox.activation_threshold"] = config.activation_threshold
    if sparsity is not None:
        fields |= sparsity_fields(sparsity)
    if predictors is not None:
        fields["kairox.predictors"] = np.frombuffer(predictors, np.uint8)
    return fields


def write_gguf(
    path: Path,
    checkpoint: Checkpoint,
    quantize: str,
    *,
    sparsity: Sparsity | None,
    predictors: bytes | None,
    report: Callable[[int, int], None],
) -> None:
    """Write the file; goes on after the last whole tensor where it holds the beginning of the same file.

    Raises:
        ValueError: the model, its tokenizer or a format has no GGUF form.
        OSError: the disk is full, or the file cannot be written.
    """
    arch = gguf_architecture(checkpoint.config)
    tensors = out_tensors(checkpoint, arch, quantize)
    fields = gguf_fields(checkpoint, arch, sparsity, predictors)
    fields["general.file_type"] = _file_type(tensors)
    head = _head(path.with_suffix(".head"), arch, fields, tensors)
    total = sum(tensor.num_bytes for tensor in tensors)
    with path.open("r+b" if path.exists() else "w+b") as file:
        if file.read(len(head)) != head:
            file.seek(0)
            file.truncate()
            file.write(head)
        written, have, at = 0, path.stat().st_size, len(head)
        for tensor in tensors:
            end = at + _padded(tensor.num_bytes)
            if have < end:
                file.seek(at)
                _write(file, tensor)
            at, written = end, written + tensor.num_bytes
            report(written, total)
        file.truncate(at)


def _write(file: Any, tensor: OutTensor) -> None:
    data = np.ascontiguousarray(tensor.read())
    if data.nbytes != tensor.num_bytes:
        raise RuntimeError(f"{tensor.name} has {data.nbytes} bytes, planned were {tensor.num_bytes}")
    file.write(data.data)
    file.write(bytes(_padded(tensor.num_bytes) - tensor.num_bytes))
    file.flush()


def _padded(num_bytes: int) -> int:
    return num_bytes + -num_bytes % ALIGNMENT


def _head(scratch: Path, arch: str, fields: dict[str, Any], tensors: list[OutTensor]) -> bytes:
    """Return all bytes before the first tensor's, as the library writes them."""
    writer = MetadataWriter(scratch, arch)
    writer.add_fields(fields)
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, raw_dtype=tensor.kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    head = scratch.read_bytes()
    scratch.unlink()
    return head + bytes(-len(head) % ALIGNMENT)


def _file_type(tensors: list[OutTensor]) -> int:
    """Return llama.cpp's number for the format of most bytes; it is shown, not relied on."""
    of_format: dict[str, int] = {}
    for tensor in tensors:
        of_format[tensor.format] = of_format.get(tensor.format, 0) + tensor.num_bytes
    return _FILE_TYPES.get(max(of_format, key=lambda fmt: of_format[fmt]), 1)


def _general(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return name, licence and the like of a GGUF source."""
    path = checkpoint.tokenizer_path
    fields = GgufFile(path).fields if path is not None and path.is_file() else {}
    own = ("general.architecture", "general.file_type", "general.quantization_version", "general.alignment")
    general = {key: value for key, value in fields.items() if key.startswith("general.") and key not in own}
    return {"general.name": checkpoint.path.stem, **general, "general.quantization_version": 2}


def _sizes(config: ModelConfig, arch: str) -> dict[str, Any]:
    norm = "layer_norm_rms_epsilon" if config.norm == "rmsnorm" else "layer_norm_epsilon"
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.context_length,
        "embedding_length": config.d_model,
        "feed_forward_length": config.num_neurons,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        f"attention.{norm}": float(np.float32(config.norm_eps)),
        "vocab_size": config.vocab_size,
    }
    if config.head_dim * config.num_heads != config.d_model:
        values |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if arch == "falcon":
        values["tensor_data_layout"] = "jploski"
    if config.positions == "rotary":
        values |= {
            "rope.dimension_count": config.head_dim,
            "rope.freq_base": float(np.float32(config.rope_theta)),
        }
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        factor = float(np.float32(config.rope_scaling.factor))
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
    if config.sliding_window is not None:
        values["attention.sliding_window"] = config.sliding_window
    return values
