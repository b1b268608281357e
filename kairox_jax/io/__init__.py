"""Reading models: where they come from, their files, tokenizer and chat template."""

from kairox_jax.io.chat_template import render_chat
from kairox_jax.io.checkpoint import Checkpoint, open_checkpoint
from kairox_jax.io.errors import FetchError, FormatError
from kairox_jax.io.own_predictors import checkpoint_predictors
from kairox_jax.io.predictors import (
    LayerPredictor,
    Predictors,
    check_predictors,
    load_predictors,
    save_predictors,
    shipped_predictors,
)
from kairox_jax.io.registry import REGISTRY, cache_folder, resolve_model
from kairox_jax.io.sparsity import (
    Sparsity,
    check_model,
    fingerprint,
    load_sparsity,
    save_sparsity,
    shipped_sparsity,
)
from kairox_jax.io.tokenizer import Tokenizer
from kairox_jax.io.trace import TraceRecorder

__all__ = [
    "REGISTRY",
    "Checkpoint",
    "FetchError",
    "FormatError",
    "LayerPredictor",
    "Predictors",
    "Sparsity",
    "Tokenizer",
    "TraceRecorder",
    "cache_folder",
    "check_model",
    "check_predictors",
    "checkpoint_predictors",
    "fingerprint",
    "load_predictors",
    "load_sparsity",
    "open_checkpoint",
    "render_chat",
    "resolve_model",
    "save_predictors",
    "save_sparsity",
    "shipped_predictors",
    "shipped_sparsity",
]
