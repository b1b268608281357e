"""Slot arrays: committed records are the store's weights in both formats; padding is dropped; bytes are as planned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_store import F, File

from kairox_jax.placement import commit_records, down_rows, empty_slots, load_store, slot_bytes
from kairox_jax.placement.slot_arrays import ColumnCodes, resolve_slot_format
from pallas_kernels.block_rows import take_rows

CAPACITY, MOVED = 20, 13
KINDS = [
    ("q8_0", "q8_0"),
    ("q4_0", "q4_0"),
    ("q4_1", "q4_1"),
    ("f16", "bf16"),
    ("q8_0", "q4_0!"),
    ("f32", "q8_0"),
]


@pytest.mark.parametrize("slot_format", ["packed", "float32"])
@pytest.mark.parametrize(("rows", "down"), KINDS)
def test_committed_records_are_the_stores(
    rows: str, down: str, slot_format: str, rng: np.random.Generator
) -> None:
    store = load_store(File(down=(down,), rows=rows))
    layout, scales = store.layouts[0], None if store.scales[0] is None else jax.device_put(store.scales[0])
    slots = empty_slots(CAPACITY, layout, slot_format)
    neurons, at = (
        rng.permutation(F)[:MOVED].astype(np.int32),
        rng.permutation(CAPACITY)[:MOVED].astype(np.int32),
    )
    padded = np.concatenate([at, np.full(3, CAPACITY, np.int32)])
    whose = np.concatenate([neurons, np.zeros(3, np.int32)])
    staging = jnp.asarray(store.gather(0, neurons, rows=len(whose)))
    slots = commit_records(slots, staging, padded, whose, scales, layout=layout, slot_format=slot_format)
    want = layout.unpack(store.layers[0], store.scales[0])
    for row, held in enumerate((*slots[:-1], down_rows(slots, scales))):
        got = np.asarray(take_rows(held, None))[:, : layout.num_elems]
        np.testing.assert_allclose(
            got[at], want[neurons, row], rtol=1e-6, atol=1e-7
        )  # XLA fuses q4_1's addition
        empty = np.setdiff1d(np.arange(CAPACITY), at)
        for leaf in jax.tree.leaves(slots):
            assert not np.asarray(leaf[empty]).any(), "padding reached a slot"


@pytest.mark.parametrize(("rows", "down"), KINDS)
def test_slots_take_the_bytes_that_are_planned(rows: str, down: str) -> None:
    layout = load_store(File(down=(down,), rows=rows)).layouts[0]
    for slot_format in ("packed", "float32"):
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(empty_slots(CAPACITY, layout, slot_format)))
        assert held == CAPACITY * slot_bytes(layout, slot_format)
    if rows != "f32":
        assert slot_bytes(layout, "packed") < 0.6 * slot_bytes(layout, "float32")


def test_packed_commit_is_in_place(rng: np.random.Generator) -> None:
    store = load_store(File(down=("q4_1",), rows="q4_1"))
    slots = empty_slots(CAPACITY, store.layouts[0], "packed")
    assert isinstance(slots[-1], ColumnCodes)
    where = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(slots)}
    ids = np.arange(4, dtype=np.int32)
    out = commit_records(
        slots, jnp.asarray(store.gather(0, ids)), ids, ids, jax.device_put(store.scales[0]),
        layout=store.layouts[0], slot_format="packed",
    )  # fmt: skip
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(out)} == where


def test_what_auto_means() -> None:
    assert resolve_slot_format("auto", "cpu") == "float32" and resolve_slot_format("auto", "gpu") == "packed"
    assert resolve_slot_format("packed", "cpu") == "packed"
