"""Where the offline profile of a replayed trace comes from: never from the steps that are replayed."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from kairox_jax.io.profile import load_profile
from kairox_jax.io.trace import Trace, read_trace

PROFILE_FRAC = 0.25  # of a lone trace, used as its profile and then not replayed


def check_same_model(traces: list[Trace]) -> None:
    """Check that all traces have the same layers and neurons.

    Raises:
        ValueError: they have not.
    """
    first = traces[0]
    for trace in traces[1:]:
        if (trace.num_layers, trace.num_neurons) != (first.num_layers, first.num_neurons):
            raise ValueError(
                f"trace {trace.name} has {trace.num_layers} x {trace.num_neurons} neurons, {first.name} "
                f"{first.num_layers} x {first.num_neurons}: replay traces of one model together"
            )


def priors_from_others(traces: list[Trace]) -> list[np.ndarray | None]:
    """Return for each trace the mean frequencies of all others; None where there are none."""
    frequencies = [trace.frequencies() for trace in traces]
    total, count = np.sum(frequencies, axis=0), len(traces) - 1
    return [((total - own) / count).astype(np.float32) if count else None for own in frequencies]


def choose_priors(traces: list[Trace], source: str) -> tuple[list[np.ndarray | None], str]:
    """Return a prior for each trace and a sentence that says where it is from.

    Args:
        traces: of one model.
        source: "auto" (the other traces; a lone trace starts neutral), "none", or the path of a profile or trace.

    Raises:
        ValueError: the path holds no profile or trace of the same model.
    """
    if source == "none" or (source == "auto" and len(traces) == 1):
        return [None] * len(traces), "no activation profile: neutral start (give --prior FILE)"
    if source == "auto":
        return priors_from_others(traces), "activation profile of each trace: the other traces"
    return [_frequencies(source, traces[0])] * len(traces), f"activation profile: {Path(source).name}"


def _frequencies(source: str, trace: Trace) -> np.ndarray:
    """Return the frequencies of a profile or trace of the same model, float32 [L, F]."""
    try:
        with zipfile.ZipFile(source) as file:
            is_profile = "frequency.npy" in file.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or "it is neither profile nor trace, or cut off"
        raise ValueError(
            f"cannot read {source}: {reason}; give a file of `kairox profile`, or a trace of --trace-out"
        ) from None
    if not is_profile:
        other = read_trace(source)
        check_same_model([trace, other])
        return other.frequencies()
    profile = load_profile(source)
    if profile.frequency.shape != (trace.num_layers, trace.num_neurons):
        raise ValueError(
            f"profile {source} is of {profile.num_layers} x {profile.num_neurons} neurons, trace {trace.name} of "
            f"{trace.num_layers} x {trace.num_neurons}: take the profile of the trace's model"
        )
    return profile.frequency


def profiled(traces: list[Trace]) -> tuple[list[Trace], list[np.ndarray | None], str]:
    """Return what to replay, with priors: of the other traces, or of a lone trace's first quarter."""
    if len(traces) > 1:
        return traces, priors_from_others(traces), "profile of each trace: the other traces"
    (trace,) = traces
    steps = int(trace.num_steps * PROFILE_FRAC)
    if steps == 0:
        raise ValueError(
            f"trace {trace.name} has {trace.num_steps} steps: compare needs 4 or more, or 2 traces"
        )
    prior = trace.frequencies(slice(0, steps))
    return (
        [trace.cut(slice(steps, None))],
        [prior],
        f"profile: the first {steps} steps, which are not replayed",
    )


def topic_switches(
    traces: list[Trace], steps: int | None
) -> tuple[list[Trace], list[np.ndarray | None], str]:
    """Return traces whose text changes in the middle, with the rest of the first text as profile.

    Args:
        traces: of one model, two or more; each is followed by the next one, the last by the first.
        steps: of a result, at most; None takes as many as a trace has.

    Raises:
        ValueError: a lone trace, or one without steps for a profile.
    """
    if len(traces) < 2:
        raise ValueError("--topic-switch joins texts: give 2 traces or more")
    half = min([trace.num_steps for trace in traces] + ([] if steps is None else [steps])) // 2
    if half == 0:
        raise ValueError("--topic-switch needs 2 steps or more of each trace")
    joined: list[Trace] = []
    priors: list[np.ndarray | None] = []
    for first, second in zip(traces, traces[1:] + traces[:1], strict=True):
        packed = np.concatenate([first.packed[:half], second.packed[:half]])
        name = f"{first.name}-to-{second.name}"
        joined.append(Trace(packed, first.num_neurons, None, {"switch_at": half}, name))
        priors.append(first.frequencies(slice(half, None)))
    note = f"each text is followed by the next after {half} steps; profile: later steps of the first"
    return joined, priors, note
