"""Sorting activations."""

from __future__ import annotations

import math

import pytest
import torch

from weightclip.errors import WeightclipError
from weightclip.nn import Abs, GroupSort, MaxMin

LAYERS = [GroupSort(2), GroupSort(3), GroupSort(6), MaxMin(), Abs()]


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
@pytest.mark.parametrize("shape", [(6,), (6, 2), (6, 2, 2)])
def test_gain_one_and_norm_kept(layer, shape, gain):
    spread = torch.randn(shape, dtype=torch.float64)
    for x in (spread, torch.ones_like(spread), spread.round()):  # ties too
        for p in (1, 2, math.inf):
            assert gain(layer, x, p) <= 1 + 1e-12
        assert layer(x.unsqueeze(0)).norm().item() == pytest.approx(x.norm().item())
    assert gain(layer, spread) == pytest.approx(1.0)


def test_sorts_channels_not_positions():
    x = torch.randn(3, 6, 5)
    y = GroupSort(3)(x)
    assert torch.equal(y[:, :3], x[:, :3].sort(1).values)
    assert torch.equal(y[:, 3:], x[:, 3:].sort(1).values)
    assert torch.equal(MaxMin()(x), GroupSort(2)(x))


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_plain_module(layer, records_independent, finite_at_degenerate, plain_module):
    records_independent(layer, torch.randn(4, 6, 3))
    finite_at_degenerate(layer, (6, 3))
    plain_module(layer, torch.randn(4, 6, 3))


def test_errors():
    with pytest.raises(WeightclipError, match="group_size"):
        GroupSort(0)
    with pytest.raises(WeightclipError, match="divisible by 2"):
        MaxMin()(torch.zeros(2, 5))
