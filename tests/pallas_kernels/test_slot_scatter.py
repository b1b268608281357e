"""slot_scatter: every implementation moves exactly the named rows, in place under donation."""

import gguf
import jax
import jax.numpy as jnp
import kernel_oracle as oracle
import numpy as np
import pytest

from pallas_kernels.block_rows import BlockRows, Rows, row_format, take_rows
from pallas_kernels.slot_scatter import slot_scatter
from pallas_kernels.slot_scatter.cases import CASES, ScatterCase, make_inputs
from pallas_kernels.slot_scatter.reference import slot_scatter_reference

by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def drawn(case: ScatterCase, rng: np.random.Generator) -> tuple[tuple, jax.Array, jax.Array]:
    cache, staging, slots = make_inputs(case, rng)
    if case.dtype in oracle.NARROW:
        dtype = oracle.NARROW[case.dtype]
        return tuple(jnp.asarray(a, dtype) for a in cache), jnp.asarray(staging, dtype), jnp.asarray(slots)
    held = tuple(oracle.stored(rows, case.dtype)[0] for rows in cache)
    return held, jnp.asarray(oracle.quantised(staging, case.dtype)[0]), jnp.asarray(slots)


def weights(rows: Rows) -> np.ndarray:
    return np.array(take_rows(rows, None)) if isinstance(rows, BlockRows) else np.array(rows)


def expected(cache: tuple, staging: jax.Array, slots: jax.Array) -> list[np.ndarray]:
    """Move rows one by one; quantised staging is unpacked by the gguf package."""
    staged, out = np.asarray(staging), [weights(rows) for rows in cache]
    if isinstance(cache[0], BlockRows):
        kind = gguf.GGMLQuantizationType[row_format(cache[0]).upper()]
        staged = gguf.quants.dequantize(staged, kind)
    for m, slot in enumerate(np.asarray(slots)):
        for r, rows in enumerate(out):
            if 0 <= slot < len(rows):
                rows[slot] = staged[m, r]
    return out


def check(out: tuple, want: list[np.ndarray]) -> None:
    assert len(out) == len(want)
    for got, rows in zip(out, want, strict=True):
        assert weights(got).dtype == rows.dtype and np.array_equal(weights(got), rows)


@by_name
@pytest.mark.parametrize("options", oracle.IMPLEMENTATIONS)
def test_named_rows_move_and_no_other(case: ScatterCase, options: dict, rng: np.random.Generator):
    cache, staging, slots = drawn(case, rng)
    want = expected(cache, staging, slots)
    check(oracle.jit(lambda *a: slot_scatter(*a, **options))(cache, staging, slots), want)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.dtype in oracle.NARROW], ids=lambda case: case.name
)
def test_reference_equals_numpy(case: ScatterCase, rng: np.random.Generator):
    cache, staging, slots = drawn(case, rng)
    check(slot_scatter_reference(cache, staging, slots), expected(cache, staging, slots))


def test_donation_is_in_place_without_temporary(rng: np.random.Generator):
    case = ScatterCase(name="memory", c=512, d=576, m=16, used=10)
    cache, staging, slots = drawn(case, rng)
    want, cache_bytes = expected(cache, staging, slots), sum(rows.nbytes for rows in cache)
    cache = tuple(jnp.copy(rows) for rows in cache)  # an array that borrows NumPy's memory cannot be donated
    staged_bytes = staging.nbytes
    donated = jax.jit(slot_scatter, donate_argnums=0).lower(cache, staging, slots).compile()
    kept = jax.jit(slot_scatter).lower(cache, staging, slots).compile()
    analysis, kept_analysis = donated.memory_analysis(), kept.memory_analysis()
    assert analysis is not None and kept_analysis is not None
    assert analysis.alias_size_in_bytes >= cache_bytes
    assert analysis.temp_size_in_bytes <= staged_bytes + 4096  # no copy of a cache array (1.2 MB each)
    assert kept_analysis.alias_size_in_bytes == 0
    where = [rows.unsafe_buffer_pointer() for rows in cache]
    out = donated(cache, staging, slots)
    assert [rows.unsafe_buffer_pointer() for rows in out] == where
    assert all(rows.is_deleted() for rows in cache)
    check(out, want)


CACHE, STAGING = (np.zeros((4, 8), np.float32),) * 3, np.zeros((2, 3, 8), np.float32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"staging": STAGING[:, :2]}, ValueError, "staging holds \\(2, 2, 8\\) weights"),
        ({"slots": np.zeros(3, np.int32)}, ValueError, "expected \\[M, R, D\\] = \\(3, 3, 8\\)"),
        ({"cache": (*CACHE[:2], np.zeros((5, 8), np.float32))}, ValueError, "cache arrays differ"),
        (
            {"staging": STAGING.astype(np.float16)},
            TypeError,
            "staging is float16, a float32 cache needs float32",
        ),
        ({"implementation": "triton", "platform": "cuda"}, ValueError, "no 'triton' form"),
        ({"implementation": "pallas", "platform": "cpu"}, ValueError, "needs a CUDA device, not 'cpu'"),
    ],
)
def test_mistakes_are_named(changes: dict, error: type[Exception], message: str):
    arguments = {"cache": CACHE, "staging": STAGING, "slots": np.zeros(2, np.int32)}
    with pytest.raises(error, match=message):
        slot_scatter(**(arguments | changes))
