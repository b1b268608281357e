"""Host kernels against NumPy float64, on ragged, empty and full sets of neurons."""

import os
import subprocess
import sys
import threading

import numba
import numpy as np
import pytest

from kairox_jax.host import MAX_BATCH, Rule, calls, matvec, reference, residual_ffn, threads
from kairox_jax.quant import FORMATS, PackedRows, RecordLayout

pytestmark = pytest.mark.slow  # many forms to compile
TOLERANCE = 1e-5  # relative, float32 weights and activations
NUM_NEURONS = 150
GATED = list(Rule)
# Formats of single weights take rows of any length.
CASES = [(name, num) for name in FORMATS for num in (64, 576, 100) if num % FORMATS[name].block_elems == 0]
UNGATED = [Rule.SILU, Rule.RELU, Rule.RELU2, Rule.FATRELU]


def relative_error(out: np.ndarray, want: np.ndarray) -> float:
    scale = np.linalg.norm(want)
    return float(np.linalg.norm(out - want) / scale) if scale else float(np.linalg.norm(out))


def layer(
    rng: np.random.Generator, batch: int, num: int, rows: int, biased: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    x = rng.normal(size=(batch, num)).astype(np.float32)
    records = (rng.normal(size=(NUM_NEURONS, rows, num)) / np.sqrt(num)).astype(np.float32)
    biases = rng.normal(size=(NUM_NEURONS, rows - 1)).astype(np.float32) if biased else None
    return x, records, biases


def clear_cut(
    x: np.ndarray, records: np.ndarray, biases: np.ndarray | None, rule: Rule, threshold: float
) -> np.ndarray:
    """Ids of neurons that rounding cannot switch on or off, in random-looking order."""
    inputs = np.einsum("bd,nrd->nrb", x.astype(np.float64), records[:, :-1].astype(np.float64))
    if biases is not None:
        inputs += biases[:, :, None]
    gate, up = inputs[:, 0], inputs[:, -1]
    distance = np.minimum(np.abs(gate), np.abs(up))
    if rule == Rule.FATRELU:
        distance = np.abs(gate - threshold)
    elif rule == Rule.SILU:
        factor = up if records.shape[1] == 3 else 1
        distance = np.abs(gate / (1 + np.exp(-gate)) * factor) - threshold
        # Just over the threshold a value is a small difference, which rounding changes in part.
        distance = np.where(distance > 0, distance - threshold / 10, -distance)
    return np.flatnonzero((distance > 1e-5).all(axis=-1))[::-1].astype(np.int32)


def run(x, records, biases, ids, n, rule, threshold, layout=None):
    out = np.full(x.shape, np.nan, np.float32)
    active = np.full((x.shape[0], ids.size), 7, np.uint8)
    residual_ffn(x, records, biases, ids, n, rule, threshold, out, active, layout=layout)
    want, want_active = np.full(x.shape, np.nan), np.full_like(active, 7)
    reference.residual_ffn(x, records, biases, ids, n, rule, threshold, want, want_active, layout=layout)
    np.testing.assert_array_equal(active, want_active)
    return out, want, active


@pytest.mark.parametrize("num", [64, 576, 100])
@pytest.mark.parametrize("batch", [1, 3, MAX_BATCH])
@pytest.mark.parametrize(("rows", "rule"), [(3, r) for r in GATED] + [(2, r) for r in UNGATED])
@pytest.mark.parametrize("biased", [False, True])
def test_ffn_matches_float64(rng, num: int, batch: int, rows: int, rule: Rule, biased: bool) -> None:
    x, records, biases = layer(rng, batch, num, rows, biased)
    ids = clear_cut(x, records, biases, rule, 0.1)
    assert ids.size > NUM_NEURONS * 0.8
    for n in (0, 1, 37, ids.size):
        out, want, active = run(x, records, biases, ids, n, rule, 0.1)
        assert relative_error(out, want) <= TOLERANCE
        assert (active[:, n:] == 7).all(), "nothing is written beyond n"
    assert 0.05 < active.mean() < 0.95, "the case must hold both active and inactive neurons"


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("rows", [2, 3])
def test_silu_values_just_over_the_threshold_count_in_part(rng, batch: int, rows: int) -> None:
    x, records, _ = layer(rng, batch, 64, rows, False)
    x, records = (
        np.abs(x),
        np.abs(records),
    )  # no cancellation: the values lie close together, and many in the ramp
    ids = np.arange(NUM_NEURONS, dtype=np.int32)
    z = (x @ records[:, 0].T) * (1 if rows == 2 else x @ records[:, 1].T)
    threshold = float(np.float32(np.median(z) / 1.25))
    out, active = np.empty(x.shape, np.float32), np.empty((batch, ids.size), np.uint8)
    wants = []
    for slope in (3, 1e9):  # with and without the ramp
        gate, up = np.float64(x) @ np.float64(records[:, 0]).T, np.float64(x) @ np.float64(records[:, -2]).T
        values = gate / (1 + np.exp(-gate)) * (1 if rows == 2 else up)
        values = np.clip(slope * (values - threshold), 0, values)
        wants.append(values @ np.float64(records[:, -1]))
    residual_ffn(x, records, None, ids, ids.size, Rule.SILU, threshold, out, active)
    assert relative_error(out, wants[0]) <= 5 * TOLERANCE
    assert relative_error(out, wants[1]) > 1e-3, "some values must lie in the ramp"


@pytest.mark.parametrize(("name", "num"), [case for case in CASES if case[0] != "f32"])
@pytest.mark.parametrize(("rows", "rule"), [(3, Rule.SILU), (3, Rule.RELU), (2, Rule.RELU2)])
@pytest.mark.parametrize(
    ("down", "batch"), [("f32", 1), ("f32", MAX_BATCH), *(("as the rest", n) for n in (1, 3, MAX_BATCH))]
)
def test_ffn_of_packed_records(
    rng, name: str, num: int, batch: int, rows: int, rule: Rule, down: str
) -> None:
    down = name if down == "as the rest" else down
    x = rng.normal(size=(batch, num)).astype(np.float32)
    layout = RecordLayout(num_elems=num, formats=(name,) * (rows - 1) + (down,))
    raw = np.zeros((NUM_NEURONS, layout.record_bytes), np.uint8)
    for row, row_format in enumerate(layout.formats):
        layout.put(raw, row, packed(rng, NUM_NEURONS, num, row_format))
    weights = layout.unpack(raw)
    ids = clear_cut(x, weights, None, rule, 0.1)
    assert ids.size > NUM_NEURONS * 0.6  # of eight tokens one may be near a threshold
    for n in (1, 37, ids.size):
        out, want, _ = run(x, raw, None, ids, n, rule, 0.1, layout)
        assert relative_error(out, want) <= TOLERANCE


@pytest.mark.parametrize("rule", GATED)
@pytest.mark.parametrize("threshold", [np.inf, 0.0])
def test_all_or_none_active(rng, rule: Rule, threshold: float) -> None:
    x, records, biases = layer(rng, 1, 64, 3, False)
    wanted = threshold == 0
    records[:, 0] = records[:, 1] = (1 if wanted else -1) * np.abs(records[:, 0]) * np.sign(x)
    ids = np.arange(NUM_NEURONS, dtype=np.int32)
    out, want, active = run(x, records, biases, ids, ids.size, rule, threshold)
    assert (active == wanted).all()
    assert relative_error(out, want) <= TOLERANCE


def test_same_bits_for_any_number_of_threads(rng, monkeypatch) -> None:
    x, records, biases = layer(rng, 2, 576, 3, False)
    ids = np.arange(NUM_NEURONS, dtype=np.int32)
    outs = []
    for count in range(1, threads.thread_count() + 1):
        monkeypatch.setitem(threads._limit, "threads", count)
        outs.append(run(x, records, biases, ids, ids.size, Rule.RELU, 0)[0])
        assert numba.get_num_threads() == count
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


def test_nan_reaches_the_output(rng) -> None:
    for rows in (2, 3):
        x, records, _ = layer(rng, 1, 64, rows, False)
        x[0, 3] = np.nan
        out, active = np.zeros_like(x), np.zeros((1, NUM_NEURONS), np.uint8)
        ids = np.arange(NUM_NEURONS, dtype=np.int32)
        residual_ffn(x, records, None, ids, ids.size, Rule.RELU, 0, out, active)
        assert np.isnan(out).all()


def test_extreme_gates_stay_finite(rng) -> None:
    x, records, _ = layer(rng, 1, 64, 3, False)
    records[:, 0] *= 1e4
    with np.errstate(over="ignore"):  # of the float64 reference
        ids = clear_cut(x, records, None, Rule.SILU, 0.1)
        out, want, _ = run(x, records, None, ids, ids.size, Rule.SILU, 0.1)
    assert np.isfinite(out).all() and relative_error(out, want) <= TOLERANCE


def test_callers_in_many_threads_take_turns(rng) -> None:
    x, records, _ = layer(rng, 1, 64, 3, False)
    ids = np.arange(NUM_NEURONS, dtype=np.int32)
    want = run(x, records, None, ids, ids.size, Rule.SILU, 0.0)[0]
    outs = [np.zeros_like(x) for _ in range(4)]

    def call(out: np.ndarray) -> None:
        for _ in range(50):
            residual_ffn(
                x, records, None, ids, ids.size, Rule.SILU, 0.0, out, np.zeros((1, ids.size), np.uint8)
            )

    callers = [threading.Thread(target=call, args=(out,)) for out in outs]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for out in outs:
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("batch", [1, 3, MAX_BATCH])
@pytest.mark.parametrize(
    ("name", "num"), [("f32", 64), ("f32", 576), ("f32", 100), ("q8_0", 64), ("q8_0", 576)]
)
def test_matvec_matches_float64(rng, batch: int, name: str, num: int) -> None:
    for num_out in (1, 77, 1000):
        matrix = packed(rng, num_out, num, name)
        x, out = (
            rng.normal(size=(batch, num)).astype(np.float32),
            np.full((batch, num_out), np.nan, np.float32),
        )
        matvec(x, matrix, out)
        want = np.zeros(out.shape)
        reference.matvec(x, matrix, want)
        assert relative_error(out, want) <= TOLERANCE
        if name == "f32":
            matvec(x, matrix.dequantize(), out)
            assert relative_error(out, want) <= TOLERANCE


def packed(rng: np.random.Generator, num_rows: int, num: int, name: str) -> PackedRows:
    """Random rows with every level of every format, and subnormal float16 numbers."""
    if FORMATS[name].block_elems == 1:
        normal = rng.normal(size=(num_rows, num)).astype(np.float32)
        if name == "bf16":
            data = (normal.view(np.uint32) >> 16).astype(np.uint16)
        elif name == "f16":
            normal[:, ::3] *= 2.0**-18
            data = normal.astype(np.float16)
        else:
            data = normal
        return PackedRows(data=data.view(np.uint8), format=name)
    data = rng.integers(0, 256, (num_rows, FORMATS[name].row_bytes(num)), np.uint8)
    blocks = data.reshape(num_rows, -1, FORMATS[name].block_bytes)
    for offset in (0, 2) if name == "q4_1" else (0,):
        scales = (rng.uniform(-1, 1, blocks.shape[:2]) / 32).astype(np.float16)
        blocks[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    return PackedRows(data=data, format=name)


def test_reference_is_the_textbook_sum(rng) -> None:
    x, records, biases = layer(rng, 2, 8, 3, True)
    assert biases is not None
    ids = np.array([5, 149, 0, 77], np.int32)
    functions = {
        Rule.SILU: lambda g, u: g / (1 + np.exp(-g)) * u,
        Rule.RELU: lambda g, u: max(g, 0) * u,
        Rule.RELU2: lambda g, u: max(g, 0) ** 2 * u,
        Rule.FATRELU: lambda g, u: (g if g > 0.3 else 0) * u,
        Rule.DRELU: lambda g, u: max(g, 0) * max(u, 0),
    }
    for rule, function in functions.items():
        want = np.zeros((2, 8))
        for b in range(2):
            for i in ids[:3]:
                gate = sum(float(w) * float(v) for w, v in zip(records[i, 0], x[b], strict=True)) + float(
                    biases[i, 0]
                )
                up = sum(float(w) * float(v) for w, v in zip(records[i, 1], x[b], strict=True)) + float(
                    biases[i, 1]
                )
                want[b] += function(gate, up) * records[i, 2].astype(np.float64)
        out, active = np.zeros((2, 8)), np.zeros((2, 4), np.uint8)
        threshold = 0.3 if rule == Rule.FATRELU else 0.0
        reference.residual_ffn(x, records, biases, ids, 3, rule, threshold, out, active)
        assert relative_error(out, want) < 1e-12


def test_errors_say_what_was_expected(rng) -> None:
    x, records, _ = layer(rng, 1, 64, 3, False)
    ids, active = np.arange(NUM_NEURONS, dtype=np.int32), np.zeros((1, NUM_NEURONS), np.uint8)

    def call(**changes) -> None:
        arguments = dict(
            x=x, records=records, biases=None, ids=ids, n=3, rule=Rule.RELU, threshold=0.0,
            out=np.zeros_like(x), active=active,
        )  # fmt: skip
        residual_ffn(**(arguments | changes))

    call()
    for changes, message in (
        ({"x": x.astype(np.float64)}, "x is float64"),
        ({"x": x[:, ::2]}, "expected C-contiguous float32"),
        ({"out": np.zeros((1, 63), np.float32)}, "out is float32"),
        ({"ids": ids.astype(np.int64)}, "ids are int64"),
        ({"n": NUM_NEURONS + 1}, "n 151"),
        ({"active": active[:, :2]}, "at least 3"),
        ({"records": records[:, :, ::2]}, "not C-contiguous"),
        ({"records": records.astype(np.float64)}, "records are float64"),
        ({"records": np.zeros((5, 1000), np.uint8)}, "or bytes with a layout"),
        ({"records": records[:, :2].copy(), "rule": Rule.DRELU}, "needs a gate row"),
        ({"biases": np.zeros((NUM_NEURONS, 1), np.float32)}, "biases is float32"),
        ({"x": np.zeros((9, 64), np.float32), "out": np.zeros((9, 64), np.float32)}, "9 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**changes)
    with pytest.raises(ValueError, match="'gelu' is not one of silu"):
        Rule.of("gelu")
    with pytest.raises(ValueError, match="not 64 q8_0 weights"):
        matvec(x, PackedRows(data=np.zeros((5, 34), np.uint8), format="q8_0"), np.zeros((1, 5), np.float32))


SMALL_RUN = """
import sys
{prelude}
import numpy as np
from kairox_jax.host import Rule, reference, residual_ffn, matvec, threads
from kairox_jax.quant import PackedRows
rng = np.random.default_rng(0)
x = rng.normal(size=(1, 100)).astype(np.float32)
records = rng.normal(size=(99, 3, 100)).astype(np.float32)
ids, active = np.arange(99, dtype=np.int32), np.zeros((1, 99), np.uint8)
out, want = np.zeros((1, 100), np.float32), np.zeros((1, 100))
residual_ffn(x, records, None, ids, 99, Rule.RELU, 0, out, active)
reference.residual_ffn(x, records, None, ids, 99, Rule.RELU, 0, want, active)
assert np.linalg.norm(out - want) <= 1e-5 * np.linalg.norm(want)
for name, row_bytes in (("f16", 128), ("bf16", 128), ("q8_0", 68), ("q4_0", 36), ("q4_1", 40)):
    data = rng.integers(0, 256, (50, row_bytes), np.uint8)
    data[:, 1::2] &= 0xBB  # small exponents, whatever the block
    matrix, x = PackedRows(data=data, format=name), rng.normal(size=(1, 64)).astype(np.float32)
    out, want = np.zeros((1, 50), np.float32), np.zeros((1, 50))
    matvec(x, matrix, out)
    reference.matvec(x, matrix, want)
    assert np.linalg.norm(out - want) <= 1e-5 * np.linalg.norm(want), name
print(threads.start())
"""


def run_fresh(tmp_path, prelude: str = "", **environment: str) -> str:
    """Run a small case in a new process with an empty cache of machine code."""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), **environment}
    result = subprocess.run(
        [sys.executable, "-c", SMALL_RUN.format(prelude=prelude)], env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()[-1]


def test_runs_without_openmp(tmp_path) -> None:
    prelude = "sys.modules['numba.np.ufunc.omppool'] = sys.modules['numba.np.ufunc.tbbpool'] = None"
    assert run_fresh(tmp_path, prelude) == "workqueue"


@pytest.mark.skipif(
    not numba.core.codegen.get_host_cpu_features(), reason="LLVM does not know this CPU's features"
)
def test_runs_as_the_plainest_cpu_of_its_kind(tmp_path) -> None:
    import platform

    generic = {"x86_64": "x86-64", "aarch64": "generic"}.get(platform.machine(), "generic")
    run_fresh(tmp_path, NUMBA_CPU_NAME=generic, NUMBA_CPU_FEATURES="")
    assert any((tmp_path / "cache").rglob("*.nbi")), "machine code is kept in the folder that was asked for"


def test_runs_where_nothing_can_be_written(tmp_path) -> None:
    prelude = (
        "import numba.core.caching as c\n"
        "def refuse(self):\n    raise OSError('read-only')\n"
        "c._CacheLocator.ensure_cache_path = refuse"
    )
    run_fresh(tmp_path, prelude)
    assert not any(tmp_path.rglob("*.nbi"))


def test_scratch_is_kept_and_grows(rng) -> None:
    x, records, _ = layer(rng, 8, 576, 3, False)
    ids = np.arange(NUM_NEURONS, dtype=np.int32)
    run(x, records, None, ids, ids.size, Rule.RELU, 0)
    before = calls._scratch["partial"]
    run(x, records, None, ids, 5, Rule.RELU, 0)
    assert calls._scratch["partial"] is before
