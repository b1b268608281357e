"""Writes a distilled model as a Hugging Face folder: safetensors, config, tokenizer."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kairox_jax.config import ModelConfig
from kairox_jax.io import Checkpoint
from kairox_jax.io.hf_model import hf_entries

_COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
_COPIED += ("chat_template.jinja", "vocab.json", "merges.txt")


def check_savable(source: Checkpoint) -> None:
    """Raise ``ValueError`` for a model that distillation or its file format does not cover."""
    config = source.config
    if config.activation != "silu" or not config.gated or config.norm != "rmsnorm" or config.parallel_block:
        raise ValueError(
            f"--relu distils gated SiLU models; this one is {config.family} with activation {config.activation}: "
            "leave --relu out"
        )
    if not source.path.is_dir() and (
        config.qkv_bias or config.sliding_window or config.positions != "rotary"
    ):
        raise ValueError(
            f"--relu of a GGUF file covers the llama architecture, not {config.family}: take the model's "
            "safetensors folder"
        )


def save_folder(folder: Path, source: Checkpoint, matrices: Mapping[str, np.ndarray]) -> None:
    """Write the model: every weight in float16, the FFN's matrices from ``matrices`` [L, F, D].

    Raises:
        ValueError: a weight beyond the range of float16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = source.config
    entries = hf_entries(config, {"model.embed_tokens.weight": (config.vocab_size, config.d_model)})
    tensors: dict[str, Callable[[], np.ndarray]] = {}
    shapes = {}
    for name, entry in entries.items():
        tensors[entry.source] = _reader(source, matrices, name, entry.transpose)
        shapes[entry.source] = entry.shape
    write_safetensors(folder / "model.safetensors", shapes, tensors)
    _write_config(folder, source)
    for name in _COPIED:
        if source.path.is_dir() and (source.path / name).is_file():
            shutil.copyfile(source.path / name, folder / name)
    if not source.path.is_dir():
        source.tokenizer().save(folder / "tokenizer.json")
        settings = {"add_bos_token": config.add_bos, "chat_template": source.chat_template}
        text = json.dumps({key: value for key, value in settings.items() if value is not None}, indent=1)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Callable[[], np.ndarray]]
) -> None:
    """Write float16 tensors, one at a time.

    Args:
        path: of the file.
        shapes: row-major shape of each.
        tensors: gives each when it is written.

    Raises:
        ValueError: a value is beyond the range of float16.
    """
    header, start = dict[str, Any](), 0
    for name, shape in shapes.items():
        end = start + 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, read in tensors.items():
            values = read()
            if not np.abs(values).max() <= np.finfo(np.float16).max:  # also true for NaN
                raise ValueError(f"{name} has values beyond float16: lower --learning-rate")
            file.write(np.ascontiguousarray(values, "<f2").tobytes())


def _reader(
    source: Checkpoint, matrices: Mapping[str, np.ndarray], name: str, transpose: bool
) -> Callable[[], np.ndarray]:
    _, _, short = name.rpartition(".")

    def read() -> np.ndarray:
        if short in matrices:
            values = matrices[short][int(name.split(".")[1])]
        else:
            values = source.tensor(name)
        return values.T if transpose else values

    return read


def _write_config(folder: Path, source: Checkpoint) -> None:
    if source.path.is_dir():
        values = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    else:
        values = llama_config(source.config)
    values |= {"hidden_act": "relu", "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def llama_config(config: ModelConfig) -> dict[str, Any]:
    """Return a LLaMA's facts under the names of ``config.json``."""
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.d_model,
        "intermediate_size": config.num_neurons,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
    }
    scaling = config.rope_scaling
    if scaling is not None:
        values["rope_scaling"] = {
            "rope_type": scaling.kind,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return values
