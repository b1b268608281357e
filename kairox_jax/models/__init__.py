"""Flax NNX modules: attention, FFN, decoder; the activation rules; loading from a checkpoint."""

from kairox_jax.models.attention import Attention, KVCache, empty_cache, mix_heads, rotary_frequencies
from kairox_jax.models.decoder import Block, Decoder
from kairox_jax.models.exact import (
    check_mode,
    find_predictors,
    find_sparsity,
    gate_thresholded,
    predicted_thresholds,
    resolve_thresholds,
)
from kairox_jax.models.ffn import FFN, Threshold
from kairox_jax.models.load import (
    load_attention,
    load_decoder,
    load_down_biases,
    load_ffn,
    load_model,
    load_norm,
)
from kairox_jax.models.norm import Norm, layer_norm, normalise, rms_norm
from kairox_jax.models.predictor import Predictor, load_predictor
from kairox_jax.models.rules import neuron_values, over_threshold
from kairox_jax.models.streamed import streamed_logits

__all__ = [
    "FFN",
    "Attention",
    "Block",
    "Decoder",
    "KVCache",
    "Norm",
    "Predictor",
    "Threshold",
    "check_mode",
    "empty_cache",
    "find_predictors",
    "find_sparsity",
    "gate_thresholded",
    "layer_norm",
    "load_attention",
    "load_decoder",
    "load_down_biases",
    "load_ffn",
    "load_model",
    "load_norm",
    "load_predictor",
    "mix_heads",
    "neuron_values",
    "normalise",
    "over_threshold",
    "predicted_thresholds",
    "resolve_thresholds",
    "rms_norm",
    "rotary_frequencies",
    "streamed_logits",
]
