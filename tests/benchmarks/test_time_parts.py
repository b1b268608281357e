"""The clocks: nested calls, what is put back, what is an error, and the adding up."""

import time
from types import SimpleNamespace

import pytest

from benchmarks.time_parts import (
    ATTENTION,
    FFN,
    HOOKS,
    LAYERS,
    PARTS,
    REST,
    WAIT,
    Hook,
    PartTimes,
    hook_cost_s,
    hooked,
    parts_ms,
    split_layers,
)


class Owner:
    def __init__(self):
        self.seen = []

    def outer(self, value):
        time.sleep(0.02)
        return self.inner(value) + 1

    def inner(self, value):
        time.sleep(0.01)
        self.seen.append(value)
        return 10 * value


TWO = (Hook("outer", "root.a", "outer", wait_for=0), Hook("inner", "root.a", "inner"))


def test_an_inner_part_counts_for_itself_only():
    owner, times, waited = Owner(), PartTimes(), []
    with hooked({"root": SimpleNamespace(a=owner)}, times, waited.append, TWO):
        begin = time.perf_counter()
        assert owner.outer(3) == 31
        total = time.perf_counter() - begin
    assert owner.seen == [3] and waited == [3] and times.calls == 3
    assert times.seconds["inner"] >= 0.01 and times.seconds["outer"] >= 0.02
    # Were the inner time counted twice, the parts would exceed the whole by 10 ms.
    assert sum(times.seconds.values()) <= total
    assert set(times.seconds) == {"outer", "inner", WAIT}


def test_methods_are_put_back_also_after_an_error():
    owner = Owner()
    with pytest.raises(ZeroDivisionError), hooked({"root": SimpleNamespace(a=owner)}, PartTimes(), id, TWO):
        assert "outer" in vars(owner)
        _ = 1 / 0
    assert set(vars(owner)) == {"seen"}


def test_module_functions_and_class_methods_are_put_back():
    class Text:
        def push(self, token):
            return token

    before, sample = Text.push, lambda logits: 7
    module = SimpleNamespace(sample=sample, Text=Text)
    hooks = (Hook("text", "m.Text", "push"), Hook("text", "m", "sample"))
    times = PartTimes()
    with hooked({"m": module}, times, id, hooks):
        assert Text().push(5) == 5 and module.sample(None) == 7
    assert times.calls == 2 and Text.push is before and module.sample is sample


@pytest.mark.parametrize("hook", [Hook("p", "root.a", "gone"), Hook("p", "root.gone.a", "inner")])
def test_a_missing_hook_is_an_error_that_names_it(hook):
    with pytest.raises(ValueError, match="'gone'.*time_parts.py"):
        with hooked({"root": SimpleNamespace(a=Owner())}, PartTimes(), id, (hook,)):
            pass


def test_the_hooks_name_what_the_engine_has():
    from kairox_jax.engine import sequence
    from kairox_jax.engine.host_dense import HostDense
    from kairox_jax.engine.hybrid import Hybrid
    from kairox_jax.engine.migrate import Migrator

    classes = {"hybrid": Hybrid, "hybrid.dense": HostDense, "hybrid.migrator": Migrator}
    owners = {**classes, "sequence": sequence, "sequence.TextStream": sequence.TextStream}
    assert [hook for hook in HOOKS if not hasattr(owners[hook.owner], hook.method)] == []


def test_what_is_none_has_no_clock():
    owner, times = SimpleNamespace(whole=None, other=lambda: 3), PartTimes()
    with hooked({"o": owner}, times, id, (Hook(LAYERS, "o", "whole"), Hook("other", "o", "other"))):
        assert owner.whole is None and owner.other() == 3
    assert owner.whole is None and list(times.seconds) == ["other"]


def test_a_call_of_all_layers_is_split_by_its_own_clocks():
    seconds = {ATTENTION: 0.5, LAYERS: 3.0}
    assert split_layers(seconds, 1.0, 1.75) == {ATTENTION: 1.5, FFN: 1.75, LAYERS: 0.25}
    assert split_layers({ATTENTION: 0.5, FFN: 2.0}, 1.0, 1.75) == {ATTENTION: 0.5, FFN: 2.0}


def test_parts_and_rest_add_up():
    parts = parts_ms({PARTS[0]: 0.25, WAIT: 0.5}, 1.0, 4)
    assert list(parts) == [*PARTS, REST]
    assert parts[PARTS[0]] == 62.5 and parts[WAIT] == 125 and parts[REST] == 62.5
    assert sum(parts.values()) == pytest.approx(1.0 * 1e3 / 4)


@pytest.mark.parametrize(
    ("seconds", "total", "steps", "message"),
    [
        ({PARTS[0]: 2.0}, 1.0, 4, "counts twice"),
        ({"surprise": 0.1}, 1.0, 4, "surprise"),
        ({}, 1.0, 0, "0 decode steps"),
    ],
)
def test_parts_that_cannot_be_right_are_refused(seconds, total, steps, message):
    with pytest.raises(ValueError, match=message):
        parts_ms(seconds, total, steps)


def test_a_clock_costs_microseconds():
    assert 0 <= hook_cost_s(2000) < 1e-3
