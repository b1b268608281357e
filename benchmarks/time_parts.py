"""Where the time of a decode step goes: clocks around the methods of a live engine, and around nothing else.

``HOOKS`` is the only place that names the engine's insides; a name that is gone is an error, never a zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

ATTENTION, FFN, LAYERS = "attention and norms", "residual FFN on the host", "call of all layers"
WAIT = "wait for the device part"
REST = "rest"


@dataclass(frozen=True)
class Hook:
    """A method whose time belongs to a part.

    Attributes:
        part: name of the part.
        owner: dotted path of the object, from the roots that ``hooked`` is given.
        method: name of the method or function.
        wait_for: index of an argument that the device may still be computing; the wait is a part of its own.
    """

    part: str
    owner: str
    method: str
    wait_for: int | None = None


HOOKS = (
    Hook(ATTENTION, "hybrid.dense", "embed"),
    Hook(ATTENTION, "hybrid.dense", "front", wait_for=2),
    Hook("launch of the device part", "hybrid", "_launch_residents"),
    Hook(FFN, "hybrid", "_residual"),
    Hook("forecast", "hybrid", "_forecast"),
    # None where there are slots; its clocks inside say what of it the attention and the FFN took.
    Hook(LAYERS, "hybrid", "_whole"),
    Hook("output matrix", "hybrid.dense", "logits", wait_for=1),
    Hook("policy and moves", "hybrid", "_add_hits"),
    Hook("policy and moves", "hybrid", "_plan"),
    Hook("policy and moves", "hybrid", "_feed_back"),
    Hook("policy and moves", "hybrid.migrator", "commit_arrived"),
    Hook("sampling and text", "sequence", "sample"),
    Hook("sampling and text", "sequence.TextStream", "push"),
)
# In the order of a step.
PARTS = (
    *dict.fromkeys(hook.part for hook in HOOKS[:4]),
    WAIT,
    *dict.fromkeys(hook.part for hook in HOOKS[4:]),
)


@dataclass
class PartTimes:
    """Time spent in each part; a part inside another one counts for itself only.

    Attributes:
        seconds: by part.
        calls: clocked calls of all parts.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    _inner: list[float] = field(default_factory=list)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a clock around it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            begin = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = perf_counter() - begin
                self.seconds[part] = self.seconds.get(part, 0.0) + spent - self._inner.pop()
                self.calls += 1
                if self._inner:
                    self._inner[-1] += spent

        return call

    def reset(self) -> None:
        """Start anew; not to be called from inside a clocked function."""
        self.seconds.clear()
        self.calls = 0


def find_owner(roots: dict[str, Any], hook: Hook) -> Any:
    """Return the object that a hook names.

    Raises:
        ValueError: it, or its method, does not exist.
    """
    first, *rest = hook.owner.split(".")
    owner, path = roots[first], first
    for name in [*rest, hook.method]:
        if not hasattr(owner, name):
            raise ValueError(
                f"{path} has no {name!r} to clock: adapt HOOKS in benchmarks/time_parts.py to the engine"
            )
        if name is not hook.method:
            owner, path = getattr(owner, name), f"{path}.{name}"
    return owner


@contextmanager
def hooked(
    roots: dict[str, Any], times: PartTimes, wait: Callable[[Any], Any], hooks: tuple[Hook, ...] = HOOKS
) -> Iterator[None]:
    """Put clocks around the methods for the duration of a ``with`` block.

    What is None has no time.

    Args:
        roots: objects that the owners' paths start from.
        times: where the time goes.
        wait: blocks until its argument is computed.
        hooks: what to clock.

    Raises:
        ValueError: a hook names something that does not exist.
    """
    owners = [find_owner(roots, hook) for hook in hooks]
    blocked = times.timed(WAIT, wait)
    undo: list[Callable[[], None]] = []
    try:
        for owner, hook in zip(owners, hooks, strict=True):
            if getattr(owner, hook.method) is None:
                continue
            undo.append(
                _replace(owner, hook.method, _clocked(hook, getattr(owner, hook.method), times, blocked))
            )
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _clocked(
    hook: Hook, function: Callable[..., Any], times: PartTimes, blocked: Callable[[Any], Any]
) -> Callable[..., Any]:
    clocked, index = times.timed(hook.part, function), hook.wait_for
    if index is None:
        return clocked

    def call(*args: Any, **kwargs: Any) -> Any:
        blocked(args[index])
        return clocked(*args, **kwargs)

    return call


def _replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; return how to undo it: an instance loses it again and finds its class's method."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    return (lambda: delattr(owner, name)) if before is None else (lambda: setattr(owner, name, before))


def split_layers(seconds: dict[str, float], attention_s: float, ffn_s: float) -> dict[str, float]:
    """Return the seconds by part where one call ran all layers: what its own clocks say goes to the parts inside."""
    if LAYERS not in seconds:
        return seconds
    inside = {ATTENTION: attention_s, FFN: ffn_s, LAYERS: -attention_s - ffn_s}
    return seconds | {part: seconds.get(part, 0.0) + more for part, more in inside.items()}


def hook_cost_s(calls: int = 20_000) -> float:
    """Return the seconds that a clock adds to one call, measured around a function that does nothing."""

    def nothing(value: int) -> int:
        return value

    clocked = PartTimes().timed("nothing", nothing)
    spent = []
    for function in (nothing, clocked, nothing, clocked):
        begin = perf_counter()
        for number in range(calls):
            function(number)
        spent.append(perf_counter() - begin)
    return max(0.0, min(spent[1], spent[3]) - min(spent[0], spent[2])) / calls


def parts_ms(seconds: dict[str, float], total_s: float, steps: int) -> dict[str, float]:
    """Return the ms a token of each part; with ``rest`` they add up to the total.

    Args:
        seconds: by part, over all steps.
        total_s: of all steps, clocked outside.
        steps: decoded tokens.

    Raises:
        ValueError: an unknown part, no step, or parts that take longer than the whole.
    """
    unknown = set(seconds) - set(PARTS)
    if unknown:
        raise ValueError(
            f"parts {sorted(unknown)} are not in PARTS: add them, or the table would lack their time"
        )
    if steps < 1:
        raise ValueError(f"{steps} decode steps: the parts need at least one")
    rest = total_s - sum(seconds.values())
    if rest < 0:
        raise ValueError(f"the parts take {-rest * 1e3:.3f} ms longer than the whole: a clock counts twice")
    return {part: seconds.get(part, 0.0) * 1e3 / steps for part in PARTS} | {REST: rest * 1e3 / steps}
