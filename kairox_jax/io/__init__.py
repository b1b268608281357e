"""Reading models: where they come from, their files, tokenizer and chat template."""

from kairox_jax.io.chat_template import render_chat
from kairox_jax.io.checkpoint import Checkpoint, open_checkpoint
from kairox_jax.io.errors import FetchError, FormatError
from kairox_jax.io.registry import REGISTRY, cache_folder, resolve_model
from kairox_jax.io.tokenizer import Tokenizer

__all__ = [
    "REGISTRY",
    "Checkpoint",
    "FetchError",
    "FormatError",
    "Tokenizer",
    "cache_folder",
    "open_checkpoint",
    "render_chat",
    "resolve_model",
]
