"""The tensors of a GGUF export: their names, formats and bytes, made one at a time from a checkpoint.

Which architecture a model is written as follows from what it computes, not from its family's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import gguf
import numpy as np

from kairox_jax.config import ModelConfig
from kairox_jax.io.checkpoint import Checkpoint
from kairox_jax.io.stored_rows import KEEP, pack_rows, stored_format, stored_rows

_GLOBAL = {
    "embed": "token_embd.weight",
    "pos_embed": "position_embd.weight",
    "out_norm": "output_norm.weight",
    "out_norm_bias": "output_norm.bias",
    "output": "output.weight",
}
_LAYER = {
    "attn_norm": "attn_norm.weight",
    "attn_norm_bias": "attn_norm.bias",
    "wq": "attn_q.weight",
    "bq": "attn_q.bias",
    "wk": "attn_k.weight",
    "bk": "attn_k.bias",
    "wv": "attn_v.weight",
    "bv": "attn_v.bias",
    "wo": "attn_output.weight",
    "bo": "attn_output.bias",
    "ffn_norm": "ffn_norm.weight",
    "ffn_norm_bias": "ffn_norm.bias",
    "w_gate": "ffn_gate.weight",
    "w_up": "ffn_up.weight",
    "b_up": "ffn_up.bias",
    "w_down": "ffn_down.weight",
    "b_down": "ffn_down.bias",
}
# Falcon: q, k and v are one tensor, and its two norms have names of their own (40B).
_FUSED = {"wq": "attn_qkv.weight", "bq": "attn_qkv.bias"}
_FALCON_NORMS = {"attn_norm": "attn_norm_2", "ffn_norm": "attn_norm"}


@dataclass(frozen=True, kw_only=True)
class OutTensor:
    """A tensor to write.

    Attributes:
        name: in the file.
        shape: row-major.
        format: GGUF's name of it in small letters.
        read: gives its bytes.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    read: Callable[[], np.ndarray]

    @property
    def kind(self) -> gguf.GGMLQuantizationType:
        """The library's name of the format."""
        return gguf.GGMLQuantizationType[self.format.upper()]

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        block_elems, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) // block_elems * block_bytes


def gguf_architecture(config: ModelConfig) -> str:
    """Return the architecture that a model is written as.

    Raises:
        ValueError: no architecture that GGUF knows is laid out like it.
    """
    if config.positions == "learned" and config.norm == "layernorm" and not config.parallel_block:
        return "opt"
    if config.norm == "layernorm" and config.parallel_block and not config.gated:
        return "falcon"
    if config.norm == "rmsnorm" and config.gated and not config.parallel_block:
        return "qwen2" if config.qkv_bias and not config.out_bias else "llama"
    raise ValueError(
        f"a {config.family} model with {config.norm}, {config.positions} positions and "
        f"{'parallel' if config.parallel_block else 'serial'} blocks has no GGUF architecture: convert it to Orbax"
    )


def out_tensors(checkpoint: Checkpoint, arch: str, quantize: str) -> list[OutTensor]:
    """List the tensors of an export in the order they are written; no weight is read.

    Raises:
        ValueError: a matrix cannot be quantised like that (see ``stored_format``).
    """
    return list(_out_tensors(checkpoint, arch, quantize))


def interleaved_rows(num_heads: int, head_dim: int) -> np.ndarray:
    """Give the row order that makes rows 2i and 2i+1 of a head a rotary pair, as llama files have it.

    Source: ``LlamaModel.permute`` of llama.cpp's converter.
    """
    order = np.arange(num_heads * head_dim).reshape(num_heads, 2, head_dim // 2)
    return order.swapaxes(1, 2).reshape(-1)


def _out_tensors(checkpoint: Checkpoint, arch: str, quantize: str) -> Iterator[OutTensor]:
    config = checkpoint.config
    for name, theirs in _GLOBAL.items():
        if checkpoint.has(name):
            yield _plain(checkpoint, [name], theirs, quantize)
    if config.rope_scaling is not None and config.rope_scaling.kind != "linear":
        yield _rope_factors(config)
    for layer in range(config.num_layers):
        for name, theirs in _layer_names(checkpoint, arch, layer).items():
            ours = [f"layers.{layer}.{part}" for part in name.split("+")]
            order = _order(config, name) if arch == "llama" else None
            yield _plain(checkpoint, ours, f"blk.{layer}.{theirs}", quantize, order)


def _layer_names(checkpoint: Checkpoint, arch: str, layer: int) -> dict[str, str]:
    """Map canonical names of one layer to the file's; ``wq+wk+wv`` is one tensor of three."""
    names = {name: theirs for name, theirs in _LAYER.items() if checkpoint.has(f"layers.{layer}.{name}")}
    if arch != "falcon":
        return names
    for kind in ("w", "b"):
        theirs = [names.pop(f"{kind}{part}", None) for part in "qkv"]
        if theirs[0] is not None:
            names["+".join(f"{kind}{part}" for part in "qkv")] = _FUSED[f"{kind}q"]
    shared = np.array_equal(
        checkpoint.tensor(f"layers.{layer}.attn_norm"), checkpoint.tensor(f"layers.{layer}.ffn_norm")
    ) and np.array_equal(
        checkpoint.tensor(f"layers.{layer}.attn_norm_bias"),
        checkpoint.tensor(f"layers.{layer}.ffn_norm_bias"),
    )
    for name, theirs in _FALCON_NORMS.items():
        for end, suffix in (("", ".weight"), ("_bias", ".bias")):
            if shared and name == "attn_norm":
                del names[name + end]
            else:
                names[name + end] = theirs + suffix
    return names


def _order(config: ModelConfig, name: str) -> np.ndarray | None:
    if name in ("wq", "bq"):
        return interleaved_rows(config.num_heads, config.head_dim)
    if name in ("wk", "bk"):
        return interleaved_rows(config.num_kv_heads, config.head_dim)
    return None


def _plain(
    checkpoint: Checkpoint, names: list[str], theirs: str, quantize: str, order: np.ndarray | None = None
) -> OutTensor:
    shapes = [checkpoint.shape(name) for name in names]
    shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    down = names[0].endswith(".w_down")
    formats = {_format(checkpoint, name, quantize, down=down) for name in names}
    fmt = formats.pop() if len(formats) == 1 else "f32"
    return OutTensor(
        name=theirs,
        shape=shape[::-1] if down else shape,
        format=fmt,
        read=partial(_read, checkpoint, names, fmt, order, down),
    )


def _format(checkpoint: Checkpoint, name: str, quantize: str, *, down: bool) -> str:
    shape = checkpoint.shape(name)
    if len(shape) == 1:
        return "f32"
    wanted = stored_format(checkpoint, name, quantize)
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[wanted.upper()]]
    if quantize != KEEP and (shape[0] if down else shape[1]) % block == 0:
        return wanted
    of_file, transposed = checkpoint.file_format(name)
    # Turned around, only single weights stay what they are: the blocks would have to be quantised again.
    return of_file if transposed == down or of_file in ("f16", "bf16") else "f32"


def _read(
    checkpoint: Checkpoint, names: list[str], fmt: str, order: np.ndarray | None, down: bool
) -> np.ndarray:
    parts = [_rows(checkpoint, name, fmt, down=down) for name in names]
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    checkpoint.release()
    return rows if order is None else rows[order]


def _rows(checkpoint: Checkpoint, name: str, fmt: str, *, down: bool) -> np.ndarray:
    """Return a tensor's bytes, [*leading, row bytes]; vectors as [n, 4], so that their items can be reordered."""
    if len(checkpoint.shape(name)) == 1:
        return checkpoint.tensor(name).view(np.uint8).reshape(-1, 4)
    of_file, transposed = checkpoint.file_format(name)
    if of_file == fmt and transposed == down:
        checkpoint.check_packed(name)
        return checkpoint.file_rows(name)
    if not down:
        return stored_rows(checkpoint, name, fmt).data
    return pack_rows(np.ascontiguousarray(checkpoint.tensor(name).T), fmt, name).data


def _rope_factors(config: ModelConfig) -> OutTensor:
    assert config.rope_scaling is not None
    half = config.head_dim // 2
    plain = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    factors = (plain / config.rope_scaling.scale(plain)).astype(np.float32)
    return OutTensor(
        name="rope_freqs.weight", shape=(half,), format="f32", read=lambda: factors.view(np.uint8)
    )
