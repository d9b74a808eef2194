"""The short way of the logistic loss: the same numbers as the general one, whoever else is in the batch."""

from __future__ import annotations

import math

import pytest
import torch

from weightclip.losses import BCEWithLogits, Loss

LOSSES = [BCEWithLogits(), BCEWithLogits(temperature=0.4), BCEWithLogits(temperature=3.0, scale_by_temperature=True)]
ODD = [(math.nan, 1.0), (math.inf, 0.0), (1e35, 1.0), (0.3, 2.0), (0.3, math.nan), (0.3, -1.0)]


@pytest.mark.parametrize("loss", LOSSES, ids=["plain", "warm", "cool"])
@pytest.mark.parametrize("shape", [(200,), (200, 1)], ids=["flat", "column"])
def test_the_short_way_gives_the_same_numbers(loss, shape):
    z, y = 6 * torch.randn(shape), torch.rand(shape).round()
    for found, expected in zip(loss.both(z, y), Loss.both(loss, z, y), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("loss", LOSSES, ids=["plain", "warm", "cool"])
@pytest.mark.parametrize("odd", ODD, ids=[f"{z} {y}" for z, y in ODD])
def test_an_odd_record_changes_nobody_elses_numbers(loss, odd):
    z, y = 6 * torch.randn(50, 1), torch.rand(50, 1).round()
    more_z, more_y = torch.cat([z, torch.tensor([[odd[0]]])]), torch.cat([y, torch.tensor([[odd[1]]])])
    alone, beside = loss.both(z, y), loss.both(more_z, more_y)
    for a, b in zip(alone, beside, strict=True):
        assert torch.equal(a, b[:50]) and bool(torch.isfinite(b).all())
    if odd[0] != 1e35:  # that one is large, and in order
        assert beside[0][50] == 0 and beside[1][50] == 0


def test_temperature_is_a_change_of_units():
    z, y = torch.randn(30, 1, dtype=torch.float64), torch.rand(30, 1, dtype=torch.float64)
    plain, warm = BCEWithLogits(), BCEWithLogits(temperature=0.4)
    torch.testing.assert_close(warm.values(z, y), plain.values(z / 0.4, y))
    assert warm.bound((1,)) == pytest.approx(2.5)
    scaled = BCEWithLogits(temperature=0.4, scale_by_temperature=True)
    torch.testing.assert_close(scaled.gradient(z, y), plain.gradient(z / 0.4, y))
    assert scaled.bound((1,)) == 1
