"""gather_gate_up: every implementation against NumPy float64 over all cases."""

import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest

from pallas_kernels.gather_gate_up import gather_gate_up
from pallas_kernels.gather_gate_up.cases import CASES, GateUpCase, gap_threshold, make_inputs
from pallas_kernels.gather_gate_up.reference import gather_gate_up_reference

by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def drawn(case: GateUpCase, rng: np.random.Generator) -> tuple[dict, float]:
    """Return the weights' true values, under "stored" the rows as kernels hold them, and a safe threshold."""
    inputs = make_inputs(case, rng)
    held = {}
    for name in ("gate", "up"):
        held[name], inputs[name] = oracle.stored(inputs[name], case.dtype)
    inputs["stored"] = held
    g = oracle.products(inputs["x"], inputs["gate"], inputs["gate_bias"])
    u = oracle.products(inputs["x"], inputs["up"], inputs["up_bias"])
    return inputs, gap_threshold(case, oracle.scores_of(case.rule, g, u))


def call(inputs: dict, case: GateUpCase, threshold: float, **options) -> jax.Array:
    """Run the public function as the engine does: inside a jit, arrays traced."""
    biases = (inputs["gate_bias"], inputs["up_bias"]) if case.biases else None
    has_threshold = case.rule in ("silu", "fatrelu")

    @oracle.jit
    def run(x, gate, up, slots, n, valid, biases, limit):
        return gather_gate_up(
            x, gate, up, slots, n, valid=valid, biases=biases, rule=case.rule,
            threshold=limit if has_threshold else None, **options,
        )  # fmt: skip

    arrays = (
        inputs["x"],
        inputs["stored"]["gate"],
        inputs["stored"]["up"],
        inputs["slots"],
        inputs["n"],
        inputs.get("valid"),
    )
    return run(*arrays, biases, np.float32(threshold))


def check(out: jax.Array, expected: np.ndarray, dtype: str) -> None:
    assert out.dtype == jnp.float32 and out.shape == expected.shape
    assert oracle.relative_error(out, expected) <= oracle.TOLERANCES[dtype]
    assert np.array_equal(np.asarray(out) != 0, expected != 0)


@by_name
@pytest.mark.parametrize("options", oracle.IMPLEMENTATIONS)
def test_list_equals_float64(case: GateUpCase, options: dict, rng: np.random.Generator):
    inputs, threshold = drawn(case, rng)
    check(call(inputs, case, threshold, **options), oracle.gate_up(inputs, case.rule, threshold), case.dtype)


@pytest.mark.parametrize("options", oracle.IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["silu", "silu-ungated"])
def test_values_just_over_the_threshold_count_in_part(name: str, options: dict, rng: np.random.Generator):
    case = next(case for case in CASES if case.name == name)
    inputs, _ = drawn(case, rng)
    whole = np.abs(oracle.gate_up(inputs, case.rule, 0.0))
    threshold = float(np.median(whole[whole > 0])) / 1.25  # the median lies half way up
    expected = oracle.gate_up(inputs, case.rule, threshold)
    in_part = (expected != 0) & (np.abs(expected) < whole)
    assert in_part.any()
    out = np.asarray(call(inputs, case, threshold, **options))
    assert oracle.relative_error(out, expected) <= 5 * oracle.TOLERANCES[case.dtype]


MASKED = ("silu", "relu", "fatrelu-ungated", "ragged-tail", "biases", "q8_0")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in MASKED], ids=lambda case: case.name)
@pytest.mark.parametrize("options", oracle.IMPLEMENTATIONS)
def test_mask_equals_float64(case: GateUpCase, options: dict, rng: np.random.Generator):
    inputs, threshold = drawn(case, rng)
    valid = rng.random(case.c) < 0.6
    masked = inputs | {"slots": np.where(valid, np.arange(case.c), -1), "n": case.c}
    out = call(inputs | {"slots": None, "n": None, "valid": valid}, case, threshold, **options)
    check(out, oracle.gate_up(masked, case.rule, threshold), case.dtype)


@pytest.mark.parametrize("case", [case for case in CASES if not case.holes], ids=lambda case: case.name)
def test_reference_equals_float64(case: GateUpCase, rng: np.random.Generator):
    inputs, threshold = drawn(case, rng)
    jnp_inputs = {
        name: None if a is None else jnp.asarray(a) for name, a in inputs.items() if name != "stored"
    }
    out = gather_gate_up_reference(**jnp_inputs, rule=case.rule, threshold=threshold)
    check(out, oracle.gate_up(inputs, case.rule, threshold), case.dtype)


def test_cases_have_active_and_inactive_neurons(rng: np.random.Generator):
    for case in CASES:
        inputs, threshold = drawn(case, rng)
        active = oracle.gate_up(inputs, case.rule, threshold)[:, : case.n] != 0
        if case.name in ("none-active", "all-cold"):
            assert not active.any()
        elif case.name == "all-active":
            assert active.all()
        elif case.name not in ("size-1", "silu-ungated"):
            assert 0 < active.mean() < 1, case.name


@pytest.mark.parametrize("options", oracle.IMPLEMENTATIONS)
def test_rows_beyond_the_count_are_not_read(options: dict, rng: np.random.Generator):
    """A NaN in an unlisted slot, or behind a hole, must not reach the output."""
    case = next(case for case in CASES if case.name == "holes")
    inputs, threshold = drawn(case, rng)
    listed = [slot for slot in inputs["slots"][: case.n] if slot >= 0]
    for name in ("gate", "up"):
        inputs[name][np.setdiff1d(np.arange(case.c), listed)] = np.nan
        inputs["stored"][name] = jnp.asarray(inputs[name])
    out = call(inputs, case, threshold, **options)
    check(out, oracle.gate_up(inputs, case.rule, threshold), case.dtype)


@pytest.mark.parametrize("options", oracle.IMPLEMENTATIONS)
def test_slots_outside_the_cache_are_skipped(options: dict, rng: np.random.Generator):
    case = next(case for case in CASES if case.name == "relu")
    inputs, threshold = drawn(case, rng)
    inputs["slots"][[0, 5]] = [case.c, 2**31 - 1]
    check(call(inputs, case, threshold, **options), oracle.gate_up(inputs, case.rule, threshold), case.dtype)


X, ROWS, LIST, COUNT = (
    np.zeros((1, 8), np.float32),
    np.zeros((4, 8), np.float32),
    np.zeros(2, np.int32),
    np.int32(1),
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "gelu"}, "'gelu' is unknown"),
        ({"rule": "drelu", "gate": None}, "'drelu' needs gate rows"),
        ({"rule": "silu"}, "'silu' needs a threshold"),
        ({"threshold": 0.5}, "'relu' has no threshold, got 0.5"),
        ({"threshold": jnp.float32(0)}, "'relu' has no threshold"),
        ({"n": None}, "not \\(slots\\)"),
        ({"valid": np.ones(4, bool)}, "not \\(slots, n, valid\\)"),
        ({"slots": None, "n": None}, "not \\(\\)"),
        ({"slots": None, "n": None, "valid": np.ones(3, bool)}, "valid \\(3,\\) does not fit 4 slots"),
        ({"x": np.zeros((1, 7), np.float32)}, "x \\(1, 7\\) and up \\(4, 8\\)"),
        ({"x": np.zeros((9, 8), np.float32)}, "batch 9 is outside 1..8"),
        ({"gate": np.zeros((3, 8), np.float32)}, "gate \\(3, 8\\) float32 and up \\(4, 8\\) float32 differ"),
        ({"gate": ROWS.astype(np.float16)}, "gate \\(4, 8\\) float16 and up \\(4, 8\\) float32 differ"),
        ({"biases": (None, np.zeros(4, np.float32))}, "gate bias is needed"),
        ({"implementation": "pallas", "platform": "cpu"}, "needs a CUDA device, not 'cpu'"),
    ],
)
def test_mistakes_are_named(changes: dict, message: str):
    arguments = {
        "x": X,
        "gate": ROWS,
        "up": ROWS,
        "slots": LIST,
        "n": COUNT,
        "rule": "relu",
        "threshold": None,
    }
    with pytest.raises(ValueError, match=message):
        gather_gate_up(**(arguments | changes))
