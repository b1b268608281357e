"""The engine: loading, prefill, decode, sampling, statistics. The only package that times and starts threads."""

from kairox_jax.engine.engine import Engine, plan_only
from kairox_jax.engine.results import Chunk, GenerationResult
from kairox_jax.engine.statistics import Statistics

__all__ = ["Chunk", "Engine", "GenerationResult", "Statistics", "plan_only"]
