"""Host side of the FFN: kernels that read neuron records at the speed of memory."""

from kairox_jax.host.attention import AttentionWeights, HostAttention, host_norm
from kairox_jax.host.calls import MAX_BATCH, aligned_zeros
from kairox_jax.host.forecast import HostPredictors
from kairox_jax.host.kernels import LayerFfn, residual_ffn
from kairox_jax.host.products import matmul, matvec
from kairox_jax.host.rows import host_formats
from kairox_jax.host.rules import Rule
from kairox_jax.host.step import HostStep, StepForecast, StepLayer
from kairox_jax.host.threads import check_threads, limit_threads, thread_count

__all__ = [
    "MAX_BATCH",
    "AttentionWeights",
    "HostAttention",
    "HostPredictors",
    "HostStep",
    "LayerFfn",
    "Rule",
    "StepForecast",
    "StepLayer",
    "aligned_zeros",
    "check_threads",
    "host_formats",
    "limit_threads",
    "host_norm",
    "matmul",
    "matvec",
    "residual_ffn",
    "thread_count",
]
