"""The engine: loading, prefill, decode, sampling, statistics. The only package that times and starts threads."""

from kairox_jax.engine.constrained import JsonGrammars
from kairox_jax.engine.engine import Engine
from kairox_jax.engine.hybrid import StepCounts
from kairox_jax.engine.opening import plan_only
from kairox_jax.engine.results import Chunk, GenerationResult, TokenLogprob
from kairox_jax.engine.serving import Worker
from kairox_jax.engine.statistics import Statistics
from kairox_jax.engine.tickets import (
    Cancelled,
    GenerationFailed,
    Interrupted,
    NotReady,
    QueueFull,
    Request,
    ServingError,
    Ticket,
    TimedOut,
)

__all__ = [
    "Cancelled",
    "Chunk",
    "Engine",
    "GenerationFailed",
    "GenerationResult",
    "Interrupted",
    "JsonGrammars",
    "NotReady",
    "QueueFull",
    "Request",
    "ServingError",
    "Statistics",
    "StepCounts",
    "Ticket",
    "TimedOut",
    "TokenLogprob",
    "Worker",
    "plan_only",
]
