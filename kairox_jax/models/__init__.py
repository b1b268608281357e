"""Flax NNX modules: attention, FFN, decoder; the activation rules; loading from a checkpoint."""

from kairox_jax.models.attention import Attention, KVCache, empty_cache, rms_norm, rotary_frequencies
from kairox_jax.models.decoder import Block, Decoder
from kairox_jax.models.ffn import FFN
from kairox_jax.models.load import load_attention, load_decoder, load_ffn
from kairox_jax.models.rules import neuron_values

__all__ = [
    "FFN",
    "Attention",
    "Block",
    "Decoder",
    "KVCache",
    "empty_cache",
    "load_attention",
    "load_decoder",
    "load_ffn",
    "neuron_values",
    "rms_norm",
    "rotary_frequencies",
]
