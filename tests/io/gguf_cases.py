"""Write the Hugging Face cases as GGUF files, by the rules of llama.cpp's and PowerInfer's converters.

Independent of the reader: from the raw tensors, with the names of the gguf library.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

MODELS = Path(__file__).parents[1] / "data/models"
Types = gguf.GGMLQuantizationType
# Hugging Face names, after the layer's prefix, in the order of the converters' tables.
_LLAMA = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OPT = {
    "self_attn_layer_norm": "attn_norm",
    "final_layer_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
}
_FALCON = {
    "input_layernorm": "attn_norm",
    "ln_mlp": "attn_norm",
    "ln_attn": "attn_norm_2",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.decoder.embed_tokens": "token_embd",
    "model.decoder.embed_positions": "position_embd",
    "model.decoder.final_layer_norm": "output_norm",
    "transformer.word_embeddings": "token_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}


def raw_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Read all tensors of a folder as float32."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as reader:
            tensors |= {name: reader.get_tensor(name).astype(np.float32) for name in reader.keys()}  # noqa: SIM118
    return tensors


def rotary_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorder q or k as llama.cpp's converter does: the two halves of a head alternate."""
    rows = values.reshape(heads, 2, -1, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)


def fused_apart(values: np.ndarray, heads: int, kv_heads: int, head: int) -> np.ndarray:
    """Put Falcon's query heads first, then all keys, then all values."""
    groups = values.reshape(kv_heads, heads // kv_heads + 2, head, *values.shape[1:])
    parts = [groups[:, :-2], groups[:, -2:-1], groups[:, -1:]]
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])


def gguf_tensors(folder: Path, config: dict[str, Any], arch: str) -> dict[str, np.ndarray]:
    """Rename and reorder a folder's tensors."""
    falcon = "falcon" in arch
    table = _FALCON if falcon else _OPT if arch == "opt" else _LLAMA
    heads = config.get("num_attention_heads")
    head = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_kv_heads") if falcon else config.get("num_key_value_heads", heads)
    if falcon and not config["new_decoder_architecture"]:
        kv_heads = 1
    found = {}
    for name, values in raw_tensors(folder).items():
        stem, end = name.rsplit(".", 1)
        if stem in _TOP:
            found[f"{_TOP[stem]}.{end}"] = values
            continue
        _, layer, rest = stem.replace("model.decoder.", "model.").split(".", 3)[1:]
        theirs = table[rest]
        if theirs == "attn_qkv":
            values = fused_apart(values, heads, kv_heads, head)
        elif theirs in ("attn_q", "attn_k") and arch in ("llama", "bamboo", "prosparse-llama"):
            values = rotary_pairs(values, heads if theirs == "attn_q" else kv_heads)
        found[f"blk.{layer}.{theirs}.{end}"] = np.ascontiguousarray(values)
    return found


def metadata(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """Give the architecture's keys that the converters write, by the type that Python has for them."""
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    falcon = "falcon" in arch
    kv_heads = config.get("num_kv_heads") if falcon else config.get("num_key_value_heads", heads)
    ffn = config.get("intermediate_size") or config.get("ffn_dim") or config["ffn_hidden_size"]
    keys: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": ffn,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
    }
    if falcon:
        keys |= {"tensor_data_layout": "jploski", "attention.layer_norm_epsilon": 1e-5}
        if not config["new_decoder_architecture"]:
            keys["attention.head_count_kv"] = 1
    elif arch == "opt":
        del keys["attention.head_count_kv"]
    else:
        keys |= {"attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "rope.dimension_count": head}
        keys |= {"attention.key_length": head, "attention.value_length": head}
        rope = config.get("rope_parameters") or config["rope_scaling"] | {"rope_theta": config["rope_theta"]}
        keys["rope.freq_base"] = float(rope["rope_theta"])
        if rope.get("rope_type") == "linear":
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        keys["attention.sliding_window"] = config["sliding_window"]
    return {f"{arch}.{key}": value for key, value in keys.items()}


def llama3_factors(config: dict[str, Any]) -> np.ndarray:
    """Compute ``rope_freqs`` as the converter does: what divides each frequency."""
    rope = config.get("rope_parameters") or config["rope_scaling"] | {"rope_theta": config["rope_theta"]}
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    old, factor = rope["original_max_position_embeddings"], rope["factor"]
    factors = []
    for i in range(0, config["head_dim"], 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / config["head_dim"])
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def by_neuron(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Turn the down matrices as PowerInfer's converter does."""
    return {
        name.replace("ffn_down", "ffn_down_t"): np.ascontiguousarray(values.T)
        if "ffn_down" in name
        else values
        for name, values in tensors.items()
    }


def predictors(tensors: dict[str, np.ndarray], layers: int, rank: int = 8) -> dict[str, np.ndarray]:
    """Give random predictors for each layer."""
    rng = np.random.default_rng(3)
    ffn, dim = tensors["blk.0.ffn_up.weight"].shape
    made = {}
    for layer in range(layers):
        made[f"blk.{layer}.fc1.weight"] = rng.normal(size=(rank + layer, dim)).astype(np.float32)
        made[f"blk.{layer}.fc2.weight"] = rng.normal(size=(ffn, rank + layer)).astype(np.float32)
    return made


def write_gguf(
    path: Path,
    arch: str,
    fields: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    magic: bytes = b"GGUF",
    types: dict[str, Types] | None = None,
) -> Path:
    """Write a file with the gguf library, and its magic."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kind = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}[type(value)]
            writer.add_key_value(key, value, gguf.GGUFValueType[kind])
    for name, values in tensors.items():
        kind = (types or {}).get(name, Types.F32)
        data = values if kind == Types.F32 else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=None if kind == Types.F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.write(magic)
    return path


def case(name: str, arch: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Give a case's metadata and tensors, as a GGUF file of this architecture holds them."""
    config = json.loads((MODELS / name / "config.json").read_text())
    return metadata(config, arch), gguf_tensors(MODELS / name, config, arch)


def case_config(name: str) -> dict[str, Any]:
    """Read a case's ``config.json``."""
    return json.loads((MODELS / name / "config.json").read_text())
