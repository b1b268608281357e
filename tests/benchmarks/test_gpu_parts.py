"""Every part of the GPU measurements runs on the CPU at tiny sizes, so that a GPU only confirms."""

import math

import numpy as np
import pytest

from benchmarks.gpu import bandwidth, link, numerics
from benchmarks.gpu.settings import SIZES, TimeBox

TINY = SIZES["tiny"]


@pytest.mark.slow
def test_numerics_checks_every_operation_and_implementation():
    rows = numerics.run(TINY, TimeBox(300))["rows"]
    assert {row["case"].split("/")[0] for row in rows} == {"gather_gate_up", "gather_down", "slot_scatter"}
    assert {row["implementation"] for row in rows} == {"xla", "pallas", "triton"}
    for row in rows:
        if row["implementation"] == "triton":  # needs a CUDA device, and says so
            assert "needs a CUDA device" in row["failed"]
        else:
            assert row["ok"], row


@pytest.mark.slow
def test_numerics_sees_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch):
    real = numerics.gather_down
    monkeypatch.setattr(numerics, "gather_down", lambda *args, **options: 1.001 * real(*args, **options))
    rows = [row for row in numerics.run(TINY, TimeBox(300))["rows"] if row["case"].startswith("gather_down")]
    assert rows and not any(row.get("ok") for row in rows)


def test_oracle_of_each_rule():
    first, up = np.array([[-1.0, 0.5, 2.0]]), np.array([[3.0, -1.0, 2.0]])
    silu = first / (1 + np.exp(-first)) * up
    assert numerics.values64("relu", first, up, silu, 0.0).tolist() == [[0.0, -0.5, 4.0]]
    assert numerics.values64("relu2", first, None, silu, 0.0).tolist() == [[0.0, 0.25, 4.0]]
    assert numerics.values64("drelu", first, up, silu, 0.0).tolist() == [[0.0, 0.0, 4.0]]
    assert numerics.values64("fatrelu", first, up, silu, 0.6).tolist() == [[0.0, 0.0, 4.0]]
    assert numerics.values64("silu", first, up, silu, 1.0)[0, 1] == 0.0


@pytest.mark.slow
def test_bandwidth_measures_kernels_and_the_dense_product():
    result = bandwidth.run(TINY, TimeBox(300))
    rows = result["rows"]
    assert result["copy_gb_per_s"] > 0 and not result["cut"]
    assert len(rows) == 2 * 4  # shares times implementations, of the one format after the first
    for row in rows:
        if row["implementation"] == "triton":
            assert "needs a CUDA device" in row["failed"]
        else:
            assert math.isclose(row["of_copy_frac"], row["gb_per_s"] / result["copy_gb_per_s"])
    moved = {row["implementation"]: row["us"] * row["gb_per_s"] for row in rows if "us" in row}
    dense = [row["us"] * row["gb_per_s"] for row in rows if row["implementation"] == "dense"]
    assert np.allclose(dense, 3 * 96 * 64 * 34 / 32 / 1e3) and moved["xla"] > 0


@pytest.mark.slow
def test_listed_neurons_are_all_active():
    """The bytes that a kernel moves are known only where no listed neuron is skipped."""
    import jax.numpy as jnp

    from pallas_kernels import gather_gate_up

    shape = TINY.shapes[0]
    for dtype in ("float32", "bfloat16", "q8_0", "q4_0"):
        gate, up, _ = bandwidth._layer(shape, dtype)
        every = jnp.ones(shape.f, bool)
        x = jnp.ones((1, shape.d))
        values = gather_gate_up(x, gate, up, None, None, valid=every, rule="relu", threshold=None)
        assert (values > 0).all(), dtype


def test_link_tries_each_kind_of_memory():
    rows = link.run(TINY, TimeBox(60))["rows"]
    assert len(rows) == len(TINY.link_bytes) * len(link.KINDS)
    assert all(row["gb_per_s"] > 0 for row in rows if row["memory"] != "pinned_host")
    assert all("gb_per_s" in row or "failed" in row for row in rows)


@pytest.mark.parametrize("part", [numerics, bandwidth, link])
def test_a_part_without_time_says_that_it_was_cut(part):
    result = part.run(TINY, TimeBox(-1))
    assert result["cut"] and not result["rows"]
