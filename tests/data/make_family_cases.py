"""Write tiny checkpoints of the families with transformers, and the logits that it computes from them.

Run where torch and transformers are installed (5.24 made those here): ``python make_family_cases.py FOLDER``.
It covers what the cases from elsewhere do not: old layouts and keys, windows, biases, other norms.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

VOCAB = 67
FALCON = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "activation": "relu"}
FALCON |= {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
LLAMA |= {"intermediate_size": 48, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
LLAMA |= {"vocab_size": VOCAB}
OPT = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "word_embed_proj_dim": 32}
OPT |= {"ffn_dim": 48, "max_position_embeddings": 64, "vocab_size": VOCAB}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 1000.0}


def main(folder: Path) -> None:
    """Write all cases into ``folder``."""
    bf16, f16, old = torch.bfloat16, torch.float16, {"new_decoder_architecture": False}
    falcon = hf.FalconConfig(**FALCON, **old, multi_query=True)
    write(folder / "falcon-one-kv", hf.FalconForCausalLM, falcon, bf16)
    falcon = hf.FalconConfig(**FALCON, **old, multi_query=False, parallel_attn=False, bias=True)
    write(folder / "falcon-serial-bias", hf.FalconForCausalLM, falcon)
    falcon = hf.FalconConfig(
        **FALCON,
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
        bias=True,
        ffn_hidden_size=80,
        tie_word_embeddings=False,
    )
    write(folder / "falcon-one-norm", hf.FalconForCausalLM, falcon)
    mistral = hf.MistralConfig(**LLAMA, hidden_act="relu", sliding_window=5, head_dim=16)
    write(folder / "mistral-window", hf.MistralForCausalLM, mistral, bf16)
    llama = hf.LlamaConfig(**LLAMA, hidden_act="relu", attention_bias=True, rope_parameters=LINEAR)
    write(folder / "llama-bias-linear", hf.LlamaForCausalLM, llama)
    write(folder / "llama-relu2", hf.LlamaForCausalLM, hf.LlamaConfig(**LLAMA, hidden_act="relu2"))
    llama = hf.LlamaConfig(**LLAMA, hidden_act="silu", rope_parameters=LLAMA3)
    write(folder / "llama-old-keys", hf.LlamaForCausalLM, llama, f16, old_keys)
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
    write(folder / "qwen2-window", hf.Qwen2ForCausalLM, hf.Qwen2Config(**LLAMA, **window, hidden_act="relu"))
    write(folder / "opt-no-bias", hf.OPTForCausalLM, hf.OPTConfig(**OPT, enable_bias=False))
    write(folder / "opt-untied", hf.OPTForCausalLM, hf.OPTConfig(**OPT, tie_word_embeddings=False), f16)


def old_keys(config: dict[str, Any]) -> None:
    """Spell the config as transformers 4.4x did."""
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": config.pop("dtype")}
    config["rope_scaling"] = rope | {"type": rope.pop("rope_type")}


def write(
    folder: Path,
    kind: Any,
    config: Any,
    dtype: torch.dtype = torch.float32,
    change: Callable[[dict[str, Any]], None] = lambda config: None,
) -> None:
    """Write a model with random weights, and the logits of two random texts in float32."""
    torch.manual_seed(len(folder.name))
    model = kind(config)
    with torch.no_grad():
        for name, values in model.named_parameters():
            norm = "norm" in name or "ln_" in name
            spread = 0.2 if norm else 0.3 if name.endswith("bias") else 0.15
            values.copy_(torch.randn_like(values) * spread + float(norm and name.endswith("weight")))
    model.to(dtype).save_pretrained(folder)
    # Read back, not cast back: casting the module would round its rotary frequencies as well.
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(3, VOCAB, (2, 19))
    with torch.no_grad():
        logits = model(ids).logits.numpy()
    np.savez_compressed(folder / "expected.npz", input_ids=ids.numpy().astype(np.int32), logits=logits)
    settings = json.loads((folder / "config.json").read_text())
    change(settings)
    (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
