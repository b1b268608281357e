"""Groups: planted ones are found, sizes are exact, swaps only help, and numbers are those of plain loops."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training import grouping
from training.grouping import balance, cohesion, group_layer, group_layers, measure, partition, split_rows
from training.grouping_swaps import improve


def planted(
    rng: np.random.Generator,
    tokens: int,
    groups: int,
    size: int,
    frequencies: tuple[float, float] = (0.1, 0.5),
) -> tuple[np.ndarray, np.ndarray]:
    """Active sets in which groups switch on and off together, and the true groups."""
    order = rng.permutation(groups * size).reshape(groups, size)
    frequency = rng.uniform(*frequencies, groups)
    active = np.zeros((tokens, groups * size), bool)
    for members, share in zip(order, frequency, strict=True):
        active[:, members] = (rng.random(tokens) < share)[:, None]
    return active ^ (rng.random(active.shape) < 0.02), order


def plain_cohesion(active: np.ndarray, groups: np.ndarray) -> float:
    shares = []
    for members in groups:
        for a, b in itertools.combinations(members, 2):
            shares.append(np.mean(active[:, a].astype(float) * active[:, b]))
    return float(np.mean(shares))


def test_planted_groups_are_found(rng: np.random.Generator) -> None:
    pytest.importorskip("pymetis", reason="pymetis is not installed")
    active, truth = planted(rng, 400, 12, 8)
    groups, metis = group_layer(active, 8)
    assert {frozenset(row) for row in groups.tolist()} == {frozenset(row) for row in truth.tolist()}
    assert sorted(metis.ravel()) == list(range(96))
    heat = active.mean(axis=0)[groups]
    assert (np.diff(heat.mean(axis=1)) <= 0).all() and (np.diff(heat, axis=1) <= 0).all()


def test_the_report_is_measured_on_other_tokens(rng: np.random.Generator) -> None:
    pytest.importorskip("pymetis", reason="pymetis is not installed")
    active, _ = planted(rng, 1024, 6, 4, (0.3, 0.3))
    orders, found = group_layers(lambda layer: active, 2, 4, done=lambda n: None)
    assert orders.shape == (2, 24)
    _, held_out = split_rows(1024)
    for order, c in zip(orders, found, strict=True):
        assert c.grouped == pytest.approx(plain_cohesion(active[held_out], order.reshape(-1, 4)))
        assert c.grouped > 2 * c.random and c.grouped > 1.5 * c.frequency
        assert c.beyond_grouped > 0.1 > 2 * abs(c.beyond_random)


def test_cohesion_is_that_of_plain_loops(rng: np.random.Generator) -> None:
    active = rng.random((40, 12)) < 0.4
    groups = rng.permutation(12).reshape(3, 4)
    assert cohesion(active, groups) == pytest.approx(plain_cohesion(active, groups), rel=1e-9)
    c = measure(active, active, groups, groups)
    mean = active.mean(axis=0)
    chance = np.mean([mean[a] * mean[b] for row in groups for a, b in itertools.combinations(row, 2)])
    assert c.beyond_grouped == pytest.approx(plain_cohesion(active, groups) - chance)


@given(seed=st.integers(0, 10**6), size=st.sampled_from([2, 3, 5]), count=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_every_part_becomes_exactly_as_large(seed: int, size: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    neurons = size * count
    parts = rng.integers(0, count, neurons)
    low, high = np.triu_indices(neurons, 1)
    kept = rng.random(len(low)) < 0.5
    groups = balance(parts, low[kept], high[kept], rng.integers(1, 9, kept.sum()), size)
    assert groups.shape == (count, size) and sorted(groups.ravel()) == list(range(neurons))
    for part, members in enumerate(groups):  # whoever need not leave stays
        assert np.isin(np.flatnonzero(parts == part), members).sum() >= min(size, (parts == part).sum())


def test_the_least_attached_leave() -> None:
    parts = np.array([0, 0, 0, 1])
    low, high, weights = np.array([0, 0, 1]), np.array([1, 2, 2]), np.array([5, 9, 5])
    groups = balance(parts, low, high, weights, 2)  # neuron 1 holds to part 0 with 10, the others with 14
    assert [set(row) for row in groups.tolist()] == [{0, 2}, {1, 3}]


@given(seed=st.integers(0, 10**6), size=st.integers(2, 4))
@settings(max_examples=30, deadline=None)
def test_swaps_end_where_no_swap_helps(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    active = rng.random((30, 3 * size)) < rng.uniform(0.1, 0.9, 3 * size)
    start = rng.permutation(3 * size).reshape(3, size)
    groups = improve(active, start, rounds=200)
    assert sorted(groups.ravel()) == list(range(3 * size))
    total = plain_cohesion(active, groups)
    assert total >= plain_cohesion(active, start) - 1e-12
    for (g, i), (h, j) in itertools.combinations(itertools.product(range(3), range(size)), 2):
        other = groups.copy()
        other[g, i], other[h, j] = groups[h, j], groups[g, i]
        assert g == h or plain_cohesion(active, other) <= total + 1e-12


def test_metis_cuts_light_edges() -> None:
    pytest.importorskip("pymetis", reason="pymetis is not installed")
    sources, targets = np.array([0, 2, 4, 1, 3, 5]), np.array([2, 4, 0, 3, 5, 1])
    weights = np.array([1.0, 1, 1, 1, 1, 1])
    light = (np.array([0, 2]), np.array([1, 3]), np.array([0.01, -3.0]))
    groups = partition(
        np.concatenate([sources, light[0]]),
        np.concatenate([targets, light[1]]),
        np.concatenate([weights, light[2]]),
        6,
        3,
    )
    assert {frozenset(row) for row in groups.tolist()} == {frozenset({0, 2, 4}), frozenset({1, 3, 5})}


def test_mistakes_take_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    active = np.ones((4, 12), bool)
    for size in (5, 1, 24):
        with pytest.raises(
            ValueError, match=f"--group-size {size} does not divide the 12 neurons.*2, 3, 4, 6"
        ):
            group_layer(active, size)
    with pytest.raises(ValueError, match="31 tokens are too few to group by: give 128 or more"):
        split_rows(31)

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(grouping, "import_module", missing)
    with pytest.raises(ValueError, match="grouping needs METIS: pip install pymetis"):
        group_layer(np.random.default_rng(0).random((40, 12)) < 0.5, 4)
