"""The laboratory: traces, hardware profiles, and a simulator that runs the engine's own policies."""

from kairox_jax.sim.replay import ReplaySettings, Result, replay
from kairox_jax.sim.trace import Trace, TraceRecorder, read_trace, write_trace

__all__ = ["ReplaySettings", "Result", "Trace", "TraceRecorder", "read_trace", "replay", "write_trace"]
