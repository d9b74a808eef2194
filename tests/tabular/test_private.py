from __future__ import annotations

import math

import numpy as np
import pytest

from weightclip.noise._streams import Streams
from weightclip.tabular._columns import BUCKETS
from weightclip.tabular._private import Door, Forest, consistent, frequent_buckets, mixed_grid, ranges, symmetric_grid

RNG = np.random.default_rng(0)


def chunks_of(values, size=100):
    return lambda: (values[i : i + size] for i in range(0, len(values), size))


def forest(values, sigma, grids, door=None):
    columns = range(values.shape[1])
    return Forest(grids, chunks_of(values), columns, sigma, door or Door(Streams.seeded(0)), "t")


def all_counts(values, grids):
    """Every count that a forest releases, before noise and post-processing."""
    leaves = len(grids[0]) - 1
    counts = np.stack([np.bincount(np.searchsorted(g[1:-1], x[np.isfinite(x)], side="right"), minlength=leaves)
                       for g, x in zip(grids, values.T, strict=True)])  # fmt: skip
    levels = [counts]
    while levels[0].shape[1] > 2:
        levels.insert(0, levels[0].reshape(len(grids), -1, 2).sum(2))
    return np.concatenate([level.ravel() for level in levels])


@pytest.mark.parametrize("record", [0.0, 5.0, -1e300, 1e300, np.nan, np.inf])
def test_one_record_moves_a_forest_by_no_more_than_its_noise_assumes(record):
    grids = [mixed_grid(0, 10, 4), mixed_grid(-5, 7, 4), mixed_grid(0, 1e6, 4)]
    values = RNG.uniform(0, 10, size=(50, 3))
    one_more = np.vstack([values, [record] * 3])
    moved = np.linalg.norm(all_counts(one_more, grids) - all_counts(values, grids))
    released = forest(values, 2.0, grids)
    assert moved <= math.sqrt(4 * 3)
    assert released.noise == pytest.approx(2.0 * math.sqrt(4 * 3))
    if np.isfinite(record):
        assert moved == pytest.approx(math.sqrt(4 * 3))  # tight: a finite record is counted on every level


def test_the_noise_of_every_count_has_the_stated_size():
    """Leaves of an empty table are pure noise; least squares over the tree only lowers it."""
    grids = [mixed_grid(0, 1, 3)] * 40
    empty = np.full((1, 40), np.nan)
    leaves = np.concatenate([forest(empty, 3.0, grids, Door(Streams.seeded(s))).leaves.ravel() for s in range(40)])
    single = 3.0 * math.sqrt(3 * 40)
    assert 0.6 * single < leaves.std() < 0.95 * single
    assert abs(leaves.mean()) < 5 * single / math.sqrt(leaves.size)


def test_consistent_trees():
    leaves = RNG.integers(0, 50, size=(2, 8)).astype(float)
    tree = [leaves.reshape(2, 2, 4).sum(2), leaves.reshape(2, 4, 2).sum(2), leaves]
    assert consistent(tree) == pytest.approx(leaves)  # nothing to repair without noise
    noisy = [level + RNG.normal(size=level.shape) for level in tree]
    # least squares by hand
    rows = [np.kron(np.eye(2), np.ones(4)), np.kron(np.eye(4), np.ones(2)), np.eye(8)]
    expected = [np.linalg.lstsq(np.vstack(rows), np.concatenate([n[i] for n in noisy]), rcond=None)[0] for i in (0, 1)]
    assert consistent(noisy) == pytest.approx(np.stack(expected))


def test_quantiles_without_noise_are_right_to_a_leaf():
    values = np.column_stack([RNG.normal(50, 10, 4000), RNG.lognormal(2, 2, 4000)])
    grids = [mixed_grid(0, 100, 8), mixed_grid(0, 1e5, 8)]
    f = forest(values, 0.0, grids)
    p = np.linspace(0.05, 0.95, 7)
    assert f.quantiles(0, p) == pytest.approx(np.quantile(values[:, 0], p), abs=1.0)
    assert f.quantiles(1, p) == pytest.approx(np.quantile(values[:, 1], p), rel=0.25)


def test_quantiles_of_noise_stay_in_range():
    f = forest(np.full((3, 2), np.nan), 100.0, [mixed_grid(-1, 1, 5)] * 2)
    for j in (0, 1):
        q = f.quantiles(j, np.linspace(0, 1, 9))
        assert np.all(np.diff(q) >= 0) and q[0] >= -1 and q[-1] <= 1


@pytest.mark.parametrize("low, high", [(0, 1), (-3, 1e9), (2000, 2020), (5, 5), (1e12, 1e12 + 1e-3), (-1e-9, 0)])
def test_grids_have_the_right_number_of_rising_boundaries(low, high):
    grid = mixed_grid(low, high, 6)
    assert len(grid) == 65 and np.all(np.diff(grid) >= 0)
    assert grid[0] <= low and grid[-1] >= high


def test_ranges_find_where_values_are():
    n = 2000
    values = np.column_stack([
        RNG.normal(37, 5, n), RNG.lognormal(10, 1, n), -RNG.uniform(1e-3, 1e-2, n), np.zeros(n), RNG.normal(0, 1, n),
    ])  # fmt: skip
    found = ranges(chunks_of(values), range(5), 3.0, Door(Streams.seeded(1)), "r")
    for (low, high), column in zip(found, values.T, strict=True):
        inside = np.mean((column >= low) & (column <= high))
        assert inside > 0.9 and low < high
    assert found[0][1] <= 1000 and found[2][1] <= 0 and found[3][1] <= 1e-5


def test_ranges_noise_has_the_stated_size():
    assert len(symmetric_grid()) == 2 * 37 + 2
    empty = np.full((1, 4), np.nan)
    spans = ranges(chunks_of(empty), range(4), 1.0, Door(Streams.seeded(0)), "r")
    assert all(np.isfinite(s).all() and s[0] < s[1] for s in spans)


def test_frequent_buckets():
    values = np.column_stack([np.repeat([7.0, 9.0, 5000.0, np.nan], [500, 300, 1, 50]), np.full(851, 3.0)])
    found = frequent_buckets(chunks_of(values), (0, 1), 4.0, Door(Streams.seeded(0)), "c")
    assert {7, 9} <= set(found[0].tolist()) and 3 in found[1].tolist()
    assert len(found[0]) + len(found[1]) < 20  # a few empty buckets pass by chance
    assert 5000 not in found[0]
    everything = frequent_buckets(chunks_of(values), (0, 1), 0.0, Door(Streams.seeded(0)), "c")
    assert everything[0].tolist() == [7, 9, 5000]


def test_bucket_noise_reaches_empty_buckets():
    """Were only present buckets noised, their list itself would tell of single records."""
    empty = np.full((1, 1), np.nan)

    class Loud(Door):
        def noise(self, values, sigma, label):
            assert values.shape == (1, BUCKETS)
            z = np.zeros(values.shape)
            z[0, [4, 8]] = 100.0
            return z

    assert frequent_buckets(chunks_of(empty), (0,), 1.0, Loud(Streams.seeded(0)), "c")[0].tolist() == [4, 8]


def test_noise_does_not_stretch_ranges():
    """Single bins that stick out of the noise by chance are not believed: values lie where many of them are."""
    values = RNG.normal(0, 1, size=(3000, 10))
    doors = [Door(Streams.seeded(s)) for s in range(40)]
    highest = [max(r[1] for r in ranges(chunks_of(values, 3000), range(10), 20.0, door, "r")) for door in doors]
    assert max(highest) <= 1000


def test_a_far_but_plentiful_part_is_found():
    values = np.where(RNG.random(20_000) < 0.9, 0.0, RNG.lognormal(8, 1, 20_000))[:, None]
    for seed in range(20):
        low, high = ranges(chunks_of(values, 20_000), (0,), 60.0, Door(Streams.seeded(seed)), "r")[0]
        assert low == 0 and 1e4 <= high <= 1e6


@pytest.mark.parametrize("record", [3, 2.5, True, "x", None, float("nan"), b"x"])
def test_a_record_votes_once_in_every_column(record, monkeypatch):
    from weightclip.tabular import _private

    seen = []
    monkeypatch.setattr(_private, "release", lambda votes, touched, *_: seen.append((votes.copy(), touched)) or votes)
    columns = [[1, 2, "a"], [True, False, None], ["x", "y", "z"]]
    assert _private.column_kinds(columns, 1.0, Door(Streams.seeded(0)), "k") == ["numeric", "flag", "categorical"]
    _private.column_kinds([[*c, record] for c in columns], 1.0, Door(Streams.seeded(0)), "k")
    moved = np.linalg.norm(seen[1][0] - seen[0][0])
    assert moved <= math.sqrt(seen[0][1]) and (moved == 0) == (record is None or record != record)
