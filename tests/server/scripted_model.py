"""A tiny ReLU checkpoint that says what a test wants: each token has one successor, whatever came before.

Its attention and FFN run as in any model, but add too little to change which token is the most probable.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

DIM, FFN, LAYERS, HEADS, KV_HEADS = 128, 160, 2, 4, 2
HEAD = DIM // HEADS
SPECIAL = ("<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>")
BOS, END, ASSISTANT = 1, 2, 4
LETTERS = [f" {chr(code)}" for code in range(ord("B"), ord("Z") + 1)]
LOOP = [f" x{i}" for i in range(16)]
MARKDOWN = [
    "# Title\n\n",
    "- **bold**\n",
    "- `code`\n\n",
    "<img src=x onerror=alert(1)>",
    " [a](javascript:alert(1))\n",
]
# What follows a prompt, by its last character ("@" stands for the chat template's end); None goes round for ever.
SCRIPTS: dict[str, tuple[list[str], bool]] = {
    "@": (["Hello", ",", " world", "!"], False),
    "A": (LETTERS, False),
    "?": ([" said", " Al", "ice", "!!", "\n", "Bob"], False),
    "L": (LOOP, True),
    "M": (MARKDOWN, False),
}
EMOJI_PROMPT, EMOJI = "e", "😀"
DEFAULT = " ok"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"
    "{% set last = messages[-1].content %}"
    "{% if 'loop' in last %}L{% elif 'markdown' in last %}M{% elif 'emoji' in last %}e{% endif %}"
)


def vocabulary() -> dict[str, int]:
    """Return the id of each token by its byte-level name."""
    words = [DEFAULT, " face", " bye"] + [word for script, _ in SCRIPTS.values() for word in script]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL, *alphabet, *(_byte_level(word) for word in words)]
    return {name: i for i, name in enumerate(dict.fromkeys(names))}


def token_id(text: str) -> int:
    """Return the id of a token by its text."""
    return vocabulary()[_byte_level(text)]


def build(folder: Path, *, template: str | None = TEMPLATE, context: int = 4096) -> Path:
    """Write the checkpoint and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = vocabulary()
    _write_tokenizer(folder, vocab, template)
    save_file(_weights(vocab), folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_act": "relu",
                "hidden_size": DIM,
                "intermediate_size": FFN,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "num_key_value_heads": KV_HEADS,
                "head_dim": HEAD,
                "max_position_embeddings": context,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "vocab_size": len(vocab),
                "bos_token_id": BOS,
                "eos_token_id": END,
                "tie_word_embeddings": False,
            }
        )
    )
    return folder


def _byte_level(text: str) -> str:
    ((piece, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return piece


def _write_tokenizer(folder: Path, vocab: dict[str, int], template: str | None) -> None:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def successors(vocab: dict[str, int]) -> dict[int, int]:
    """Return which token follows which; all others are followed by ``DEFAULT``."""
    chains = []
    for trigger, (script, again) in SCRIPTS.items():
        first = ASSISTANT if trigger == "@" else vocab[trigger]
        ids = [vocab[_byte_level(word)] for word in script]
        chains.append([first, *ids, ids[0] if again else END])
    face = [vocab[char] for char in _byte_level(EMOJI)]
    chains.append([vocab[EMOJI_PROMPT], vocab[_byte_level(" face")], *face, vocab[_byte_level(" bye")], END])
    chains.append([vocab[_byte_level(DEFAULT)], END])
    return {a: b for chain in chains for a, b in zip(chain[:-1], chain[1:], strict=True)}


def _weights(vocab: dict[str, int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)  # one that leaves every successor 2 nats ahead
    embed = rng.choice([-1.0, 1.0], (len(vocab), DIM))
    embed[:, 0] = 2.0  # the direction of the default successor
    output = rng.normal(0, 0.01, (len(vocab), DIM))
    output[vocab[_byte_level(DEFAULT)], 0] = 1.75
    for token, following in successors(vocab).items():
        output[following, 1:] += 0.05 * embed[token, 1:]
    weights = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": output,
        "model.norm.weight": np.ones(DIM),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD, DIM),
            "self_attn.k_proj": (KV_HEADS * HEAD, DIM),
            "self_attn.v_proj": (KV_HEADS * HEAD, DIM),
            "self_attn.o_proj": (DIM, HEADS * HEAD),
            "mlp.gate_proj": (FFN, DIM),
            "mlp.up_proj": (FFN, DIM),
            "mlp.down_proj": (DIM, FFN),
        }
        for name, shape in shapes.items():
            small = name.endswith(("o_proj", "down_proj"))
            weights[f"{prefix}{name}.weight"] = rng.normal(0, 0.001 if small else 0.1, shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = np.ones(DIM)
    return {name: np.ascontiguousarray(value, np.float32) for name, value in weights.items()}
