"""Build tiny checkpoints with transformers itself, and the logits that it computes from them.

Run in an environment with torch and transformers: ``python build_cases.py FOLDER`` (``make parity`` does).
"""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers as hf

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from make_family_cases import write

VOCAB = 101
LLAMA: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "bos_token_id": 1}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "eos_token_id": 2}
LLAMA |= {"max_position_embeddings": 128}
OPT: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 40, "word_embed_proj_dim": 40, "ffn_dim": 96}
OPT |= {"num_hidden_layers": 3, "num_attention_heads": 5, "max_position_embeddings": 32}
FALCON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "activation": "relu",
}
FALCON |= {"num_attention_heads": 6, "bos_token_id": 1, "eos_token_id": 2}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 24, "rope_theta": 500.0}


def old_falcon(config: dict[str, Any]) -> None:
    """Spell the config as the first Falcon 7B did."""
    config |= {"model_type": "RefinedWebModel", "n_head": config.pop("num_attention_heads")}
    config |= {"n_layer": config.pop("num_hidden_layers"), "torch_dtype": config.pop("dtype")}
    for key in ("rope_parameters", "num_kv_heads", "new_decoder_architecture", "num_ln_in_parallel_attn"):
        config.pop(key, None)
    config.pop("ffn_hidden_size", None)


def old_llama(config: dict[str, Any]) -> None:
    """Spell the config as transformers 4.2x did, before grouped heads and rotary settings."""
    for key in ("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "rope_parameters"):
        config.pop(key, None)
    config["torch_dtype"] = config.pop("dtype")


def main(folder: Path) -> None:
    """Write all cases into ``folder``."""
    hf.utils.logging.disable_progress_bar()
    f16, bf16 = torch.float16, torch.bfloat16
    write(folder / "opt", hf.OPTForCausalLM, hf.OPTConfig(**OPT))
    write(folder / "opt-f16", hf.OPTForCausalLM, hf.OPTConfig(**OPT, tie_word_embeddings=False), f16)
    relu = LLAMA | {"hidden_act": "relu"}
    write(folder / "llama-relu", hf.LlamaForCausalLM, hf.LlamaConfig(**relu))
    full = relu | {"num_key_value_heads": 6}
    write(folder / "llama-relu-old", hf.LlamaForCausalLM, hf.LlamaConfig(**full), f16, old_llama)
    tied = hf.LlamaConfig(**relu, tie_word_embeddings=True, rope_parameters=LINEAR, head_dim=12)
    write(folder / "llama-linear-tied", hf.LlamaForCausalLM, tied, bf16)
    write(folder / "llama-llama3", hf.LlamaForCausalLM, hf.LlamaConfig(**relu, rope_parameters=LLAMA3))
    mistral = hf.MistralConfig(**relu, sliding_window=6, head_dim=8)
    write(folder / "mistral-relu", hf.MistralForCausalLM, mistral)
    write(folder / "qwen2-relu", hf.Qwen2ForCausalLM, hf.Qwen2Config(**relu))
    qwen2 = hf.Qwen2Config(**relu, tie_word_embeddings=True)
    write(folder / "qwen2-relu-tied", hf.Qwen2ForCausalLM, qwen2, bf16)
    one = hf.FalconConfig(**FALCON, new_decoder_architecture=False, multi_query=True)
    write(folder / "falcon-old", hf.FalconForCausalLM, one)
    write(folder / "falcon-old-keys", hf.FalconForCausalLM, one, bf16, old_falcon)
    serial = hf.FalconConfig(
        **FALCON, new_decoder_architecture=False, multi_query=False, parallel_attn=False, bias=True
    )
    write(folder / "falcon-old-serial", hf.FalconForCausalLM, serial)
    new = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 112}
    write(folder / "falcon-new", hf.FalconForCausalLM, hf.FalconConfig(**new))
    norm = hf.FalconConfig(**new, num_ln_in_parallel_attn=1, tie_word_embeddings=False)
    write(folder / "falcon-new-one-norm", hf.FalconForCausalLM, norm)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
