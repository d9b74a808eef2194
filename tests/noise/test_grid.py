"""Integer sums: any order, the same bits; one record moves them by no more than the slack allows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.engine_kit import difference, layer_norms, mlp, private, release, same_bits, table
from torch import Tensor

import weightclip as wc
from weightclip.noise import GridSums


def total(batches: list[Tensor], delta: float) -> Tensor:
    sums = GridSums(1000, len(batches))
    sums.begin([delta])
    for batch in batches:
        sums.add([batch])
    (value,) = sums.values()
    assert value is not None
    return value


def test_the_order_does_not_matter_and_the_error_is_below_a_unit_a_batch() -> None:
    rng = torch.Generator().manual_seed(0)
    batches = [torch.randn(50, generator=rng, dtype=torch.float64) * 10.0 ** (-k) for k in range(9)]
    forward, backward = total(batches, 3.0), total(batches[::-1], 3.0)
    assert torch.equal(forward, backward)
    assert not torch.equal(sum(batches), sum(batches[::-1]))  # floats do not have that
    assert float((forward - sum(batches)).abs().max()) <= 9 * 2.0 ** (1 - 36)


@pytest.mark.parametrize("seed", range(20))
def test_one_record_moves_the_sum_by_no_more_than_the_slack(seed: int) -> None:
    """Entries one rounding away from multiples of the unit, and a record that moves others from batch to batch."""
    rng = np.random.default_rng(seed)
    dim, pieces, delta = int(rng.integers(1, 2000)), int(rng.integers(1, 9)), float(np.exp(rng.normal()))
    unit = 2.0 ** (math.floor(math.log2(delta)) - 36)
    others = [
        torch.from_numpy(unit * (rng.integers(-5, 5, dim) + rng.choice([-1e-7, 1e-7], dim))) for _ in range(pieces)
    ]
    record = torch.from_numpy(rng.normal(size=dim))
    record = record * (delta / record.norm())
    without = total(others, delta)
    shifted = [a + unit * 1e-6 * (1 if i % 2 else -1) for i, a in enumerate(others)]  # pairs of moves that cancel
    shifted[-1] = sum(others) + record - sum(shifted[:-1]) if pieces > 1 else others[0] + record
    with_it = total(shifted, delta)
    slack = GridSums(1000, pieces).slack(dim)
    assert float((with_it - without).norm()) <= delta * slack
    assert float((with_it - without - record).norm()) <= delta * (slack - 1)


def test_the_slack_is_needed() -> None:
    """Entries just below a unit in every batch, and just at it after a tiny record: units appear from nothing."""
    delta, dim, pieces = 1.0, 400, 8
    unit = 2.0**-36
    below = [torch.full((dim,), unit * (1 - 1e-9), dtype=torch.float64) for _ in range(pieces)]
    above = [torch.full((dim,), unit, dtype=torch.float64) for _ in range(pieces)]
    moved = float((total(above, delta) - total(below, delta)).norm())
    assert moved > 1e6 * float((sum(above) - sum(below)).norm())
    assert moved <= delta * (GridSums(1000, pieces).slack(dim) - 1)


def test_the_engine_allows_for_the_grid_and_stays_within_it() -> None:
    x, y = table(12)
    extra = torch.cat([x, 100 * x[:1]]), torch.cat([y, y[:1]])
    bounds = wc.Bounds(layer_cap=0.5, bias_scale=0.2)
    common = {"bounds": bounds, "batch": 12, "sample_rate": 1.0, "max_physical_batch_size": 4}
    here, there = (private(mlp(), d, **common, exact_sums=True) for d in ((x, y), extra))
    plain = private(mlp(), (x, y), **common)
    for name, row in here.layers().items():
        assert row["sensitivity"] > plain.layers()[name]["sensitivity"]
    moved = layer_norms(difference(release(there), release(here)), 0.2)
    for name, distance in moved.items():
        assert 0.05 < distance <= there.layers()[name]["sensitivity"] * (1 + 1e-5)
    close = difference(release(here), release(plain))
    assert all(float(value.abs().max()) < 1e-5 for value in close.values())


def test_pieces_of_other_sizes_give_other_bits_of_the_same_sum() -> None:
    runs = [private(mlp(), table(24), max_physical_batch_size=size, exact_sums=True) for size in (4, 4, 5)]
    first, again, other = [run.train().grads() for run in runs]
    assert same_bits(first, again)
    assert all(torch.allclose(first[k], other[k], atol=1e-6) for k in first)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(wc.WeightclipError, match="exact_sums takes draws of at most"):
        GridSums(2**25, 1)
    with pytest.raises(wc.WeightclipError, match="drop mechanism"):
        private(mlp(), table(8), sigma=1.0, mechanism=wc.KNorm(2), exact_sums=True)


def test_an_abandoned_draw_leaves_nothing() -> None:
    run, twin = (private(mlp(), table(24), max_physical_batch_size=4, exact_sums=True) for _ in range(2))
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
        break
    assert any(t is not None for t in run.engine.training.release.collected())
    assert same_bits(run.train().grads(), twin.train().grads())
