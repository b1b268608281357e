"""Host side of the FFN: kernels that read neuron records at the speed of memory."""

from kairox_jax.host.kernels import MAX_BATCH, matvec, residual_ffn
from kairox_jax.host.rules import Rule
from kairox_jax.host.threads import thread_count

__all__ = ["MAX_BATCH", "Rule", "matvec", "residual_ffn", "thread_count"]
