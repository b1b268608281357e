"""A checkpoint's tokenizer as files of their own: copied into a converted checkpoint, and read from there."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kairox_jax.config import ModelConfig
from kairox_jax.io.errors import FormatError
from kairox_jax.io.gguf_file import GgufFile
from kairox_jax.io.gguf_header import StringArray
from kairox_jax.io.gguf_tokenizer import gguf_tokenizer
from kairox_jax.io.hf_tokenizer import hf_tokenizer
from kairox_jax.io.tokenizer import Tokenizer

FOLDER, VOCABULARY = "tokenizer", "tokenizer.gguf"
# What transformers writes of a tokenizer, and what people keep beside it.
_HF_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_TYPES = gguf.GGUFValueType


def write_tokenizer(source: Path, folder: Path) -> str | None:
    """Copy a tokenizer into a folder, so that it is rebuilt exactly.

    Args:
        source: the GGUF file or the folder that holds it.
        folder: gets ``tokenizer.gguf`` (a GGUF file without tensors) or the folder ``tokenizer``.

    Returns:
        The name of what was written; None where the source has no tokenizer.
    """
    if source.is_file():
        fields = GgufFile(source).fields
        kept = {key: value for key, value in fields.items() if key.startswith(("tokenizer.", "general."))}
        if "tokenizer.ggml.tokens" not in kept:
            return None
        writer = MetadataWriter(folder / VOCABULARY, str(kept.get("general.architecture", "llama")))
        writer.add_fields(kept)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        return VOCABULARY
    files = [source / name for name in _HF_FILES if (source / name).is_file()]
    if not has_tokenizer(source):
        return None
    (folder / FOLDER).mkdir(exist_ok=True)
    for file in files:
        shutil.copyfile(file, folder / FOLDER / file.name)
    return FOLDER


def has_tokenizer(folder: Path) -> bool:
    """Say whether a folder holds a tokenizer in one of the forms that are read."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "merges.txt", "tokenizer.model"))


def read_tokenizer(path: Path | None, config: ModelConfig, index: Path) -> Tokenizer:
    """Rebuild a tokenizer that ``write_tokenizer`` wrote; ``index`` is named where there is none.

    Raises:
        FormatError: there is none, or it is broken.
    """
    if path is None:
        raise FormatError(index, "tokenizer", "missing: the source of this checkpoint had none")
    if path.is_dir():
        return hf_tokenizer(path, bos_id=config.bos_id, eos_ids=config.eos_ids, add_bos=config.add_bos)
    if not path.is_file():
        raise FormatError(path, "tokenizer", "missing: convert the source again with --force")
    return gguf_tokenizer(GgufFile(path))


class MetadataWriter(gguf.GGUFWriter):
    """The library's writer, with arrays of numbers written at once: it packs them number by number."""

    def add_fields(self, fields: Mapping[str, Any]) -> None:
        """Add metadata as ``GgufFile`` read it, or plain values; the architecture is the writer's own.

        Empty arrays are left out: the format cannot say their type.
        """
        for key, value in fields.items():
            if key == "general.architecture":
                continue
            if isinstance(value, StringArray | list | np.ndarray):
                if len(value):
                    value = value if isinstance(value, np.ndarray) else list(value)
                    self.add_key_value(key, value, _TYPES.ARRAY, sub_type=_TYPES.STRING)
            else:
                self.add_key_value(key, value, _scalar_type(value))

    def _pack_val(
        self, val: Any, vtype: gguf.GGUFValueType, add_vtype: bool, sub_type: gguf.GGUFValueType | None = None
    ) -> bytes:
        if not isinstance(val, np.ndarray):
            return super()._pack_val(val, vtype, add_vtype, sub_type)
        kind = gguf.GGUFValueType[val.dtype.name.upper()]
        return struct.pack("<IIQ", _TYPES.ARRAY, kind, len(val)) + np.ascontiguousarray(val).tobytes()


def _scalar_type(value: Any) -> gguf.GGUFValueType:
    if isinstance(value, bool):
        return _TYPES.BOOL
    if isinstance(value, str):
        return _TYPES.STRING
    if isinstance(value, float):
        return _TYPES.FLOAT32 if float(np.float32(value)) == value else _TYPES.FLOAT64
    if value < 0:
        return _TYPES.INT32 if value >= -(2**31) else _TYPES.INT64
    return _TYPES.UINT32 if value < 2**32 else _TYPES.UINT64
