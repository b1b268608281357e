"""A tiny llama checkpoint, written as GGUF by the gguf library."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

Types = gguf.GGMLQuantizationType


@dataclass
class TinyLlama:
    """Sizes, and weights by GGUF name; q and k in half-split rotary order."""

    layers: int = 2
    dim: int = 64
    ffn: int = 96
    heads: int = 4
    kv_heads: int = 2
    tied: bool = False
    vocab: int = 262
    types: dict[str, Types] = field(default_factory=dict)
    metadata: dict[str, tuple[Any, gguf.GGUFValueType]] = field(default_factory=dict)

    def weights(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(7)
        head = self.dim // self.heads
        shapes = {"token_embd.weight": (self.vocab, self.dim), "output_norm.weight": (self.dim,)}
        if not self.tied:
            shapes["output.weight"] = (self.vocab, self.dim)
        for layer in range(self.layers):
            for name, shape in {
                "attn_norm": (self.dim,),
                "attn_q": (self.heads * head, self.dim),
                "attn_k": (self.kv_heads * head, self.dim),
                "attn_v": (self.kv_heads * head, self.dim),
                "attn_output": (self.dim, self.heads * head),
                "ffn_norm": (self.dim,),
                "ffn_gate": (self.ffn, self.dim),
                "ffn_up": (self.ffn, self.dim),
                "ffn_down": (self.dim, self.ffn),
            }.items():
                shapes[f"blk.{layer}.{name}.weight"] = shape
        return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """As the converter of llama.cpp does to q and k."""
    rows, cols = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols)


def byte_tokens() -> list[str]:
    """The 256 characters of byte-level BPE, in the order of GPT-2's vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def write(path: Path, model: TinyLlama) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(model.layers)
    writer.add_context_length(128)
    writer.add_embedding_length(model.dim)
    writer.add_feed_forward_length(model.ffn)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_tokens(), "he", "ll", "hell"])
    writer.add_token_types([3, 3, 3] + [1] * 259)
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    for key, (value, kind) in model.metadata.items():
        writer.add_key_value(key, value, kind)
    for name, values in model.weights().items():
        kind = model.types.get(name, Types.F32)
        if ".attn_q." in name or ".attn_k." in name:
            values = permute(values, model.heads if ".attn_q." in name else model.kv_heads)
        if kind == Types.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def write_llama(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny llama file; takes the fields of ``TinyLlama``."""
    return lambda **sizes: write(tmp_path / "tiny.gguf", TinyLlama(**sizes))


@pytest.fixture
def tiny_weights() -> Callable[..., dict[str, np.ndarray]]:
    """The weights that ``write_llama`` writes."""
    return lambda **sizes: TinyLlama(**sizes).weights()
