"""The laboratory: traces, hardware profiles, and a simulator that runs the engine's own policies."""

from kairox_jax.io.trace import Trace, TraceRecorder, read_trace, write_trace
from kairox_jax.sim.replay import ReplaySettings, Result, replay

__all__ = ["ReplaySettings", "Result", "Trace", "TraceRecorder", "read_trace", "replay", "write_trace"]
