"""gather_down: every implementation and both reductions against NumPy float64 over all cases."""

import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest

from pallas_kernels.gather_down import gather_down
from pallas_kernels.gather_down.cases import CASES, DownCase, make_inputs
from pallas_kernels.gather_down.reference import gather_down_reference

by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
both_reductions = pytest.mark.parametrize("deterministic", [True, False], ids=["two-pass", "atomic"])


def drawn(case: DownCase, rng: np.random.Generator) -> dict:
    """Return the weights' true values, and under "stored" the rows as kernels hold them."""
    inputs = make_inputs(case, rng)
    held, inputs["down"] = oracle.stored(inputs["down"], case.dtype)
    return inputs | {"stored": held}


def expected(inputs: dict) -> np.ndarray:
    return oracle.down_sum(*(inputs[name] for name in ("values", "down", "slots", "n")))


def call(inputs: dict, **options) -> jax.Array:
    """Run the public function as the engine does: inside a jit, arrays traced."""
    run = oracle.jit(lambda *a: gather_down(*a[:4], valid=a[4], **options))
    out = run(*(inputs.get(name) for name in ("values", "stored", "slots", "n", "valid")))
    return out[:, : inputs["down"].shape[1]]  # shared scales pad D to whole blocks


def check(out: jax.Array, expected: np.ndarray, dtype: str) -> None:
    assert out.dtype == jnp.float32 and out.shape == expected.shape
    assert oracle.relative_error(out, expected) <= oracle.TOLERANCES[dtype]


@by_name
@pytest.mark.parametrize("options", oracle.IMPLEMENTATIONS)
def test_list_equals_float64(case: DownCase, options: dict, rng: np.random.Generator):
    inputs = drawn(case, rng)
    check(call(inputs, deterministic=True, **options), expected(inputs), case.dtype)


ATOMIC = (
    "ragged-tail",
    "all-cold",
    "more-chunks-than-parts",
    "batch-3",
    "bfloat16",
    "q4_0",
    "q8_0_column",
    "q4_1_column",
)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ATOMIC], ids=lambda case: case.name)
@pytest.mark.parametrize("options", oracle.IMPLEMENTATIONS[1:])
def test_atomic_form_equals_float64(case: DownCase, options: dict, rng: np.random.Generator):
    inputs = drawn(case, rng)
    check(call(inputs, deterministic=False, **options), expected(inputs), case.dtype)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", oracle.IMPLEMENTATIONS)
def test_mask_equals_float64(options: dict, batch: int, rng: np.random.Generator):
    case = DownCase(name="mask", b=batch, k=64)
    inputs = drawn(case, rng)
    valid = rng.random(case.c) < 0.6
    out = call(inputs | {"slots": None, "n": None, "valid": valid}, deterministic=True, **options)
    listed = {"slots": np.where(valid, np.arange(case.c), -1), "n": case.c}
    check(out, expected(inputs | listed), case.dtype)


@pytest.mark.parametrize("case", [case for case in CASES if not case.holes], ids=lambda case: case.name)
def test_reference_equals_float64(case: DownCase, rng: np.random.Generator):
    inputs = drawn(case, rng)
    out = gather_down_reference(*(jnp.asarray(inputs[name]) for name in ("values", "down", "slots", "n")))
    check(out, expected(inputs), case.dtype)


@both_reductions
@pytest.mark.parametrize("options", oracle.IMPLEMENTATIONS)
def test_unlisted_slots_and_values_do_not_count(options: dict, deterministic: bool, rng: np.random.Generator):
    case = next(case for case in CASES if case.name == "holes")
    inputs = drawn(case, rng)
    listed = [slot for slot in inputs["slots"][: case.n] if slot >= 0]
    # The kernels read no such row; XLA may multiply it by 0.
    junk = 1e30 if options["implementation"] == "xla" else np.nan
    inputs["down"][np.setdiff1d(np.arange(case.c), listed)] = junk
    inputs["stored"] = jnp.asarray(inputs["down"])
    inputs["values"][:, case.n :] = 1e6
    out = call(inputs, deterministic=deterministic, **options)
    check(out, expected(inputs), case.dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not oracle.HAS_GPU, reason="jax.default_backend() is not 'gpu'")
def test_two_pass_repeats_bit_for_bit(rng: np.random.Generator):
    inputs = drawn(DownCase(name="large", c=4096, d=4096, k=4096, n=4000), rng)
    arrays = [jnp.asarray(inputs[name]) for name in ("values", "stored", "slots", "n")]
    run = jax.jit(lambda *a: gather_down(*a, deterministic=True, implementation="pallas"))
    first = np.asarray(run(*arrays))
    assert all(np.array_equal(first, np.asarray(run(*arrays))) for _ in range(20))


VALUES, DOWN = np.zeros((1, 2), np.float32), np.zeros((4, 8), np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": np.zeros((1, 3), np.float32)}, "values \\(1, 3\\) do not fit 2 selected slots"),
        ({"values": np.zeros((9, 2), np.float32)}, "batch 9 is outside 1..8"),
        ({"n": None}, "not \\(slots\\)"),
        ({"slots": None, "n": None, "valid": np.ones(4, bool)}, "do not fit 4 selected slots"),
        ({"implementation": "pallas", "platform": "cpu"}, "needs a CUDA device, not 'cpu'"),
    ],
)
def test_mistakes_are_named(changes: dict, message: str):
    arguments = {"values": VALUES, "down": DOWN, "slots": np.zeros(2, np.int32), "n": np.int32(1)}
    with pytest.raises(ValueError, match=message):
        gather_down(**(arguments | changes), **{"deterministic": True})
