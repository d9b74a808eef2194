"""Residual connections."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from weightclip.errors import WeightclipError
from weightclip.nn import ConvexResidual, Residual


def _branch(norm: float) -> nn.Linear:
    layer = nn.Linear(5, 5, bias=False).double()
    with torch.no_grad():
        layer.weight *= norm / torch.linalg.matrix_norm(layer.weight, 2)
    return layer


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_convex_gain_does_not_grow_with_depth(weight, gain):
    layer = nn.Sequential(*(ConvexResidual(nn.Sequential(_branch(1.0), nn.ReLU()), weight) for _ in range(20)))
    assert gain(layer, torch.randn(5, dtype=torch.float64)) <= 1 + 1e-9


def test_values_and_gains(gain):
    body, shortcut = _branch(2.0), _branch(0.5)
    x = torch.randn(1, 5, dtype=torch.float64)
    torch.testing.assert_close(Residual(body)(x), x + body(x))
    torch.testing.assert_close(Residual(body, shortcut)(x), shortcut(x) + body(x))
    torch.testing.assert_close(ConvexResidual(body, 0.25, shortcut)(x), 0.75 * shortcut(x) + 0.25 * body(x))
    assert gain(Residual(body, shortcut), x[0]) <= 2.5
    assert gain(ConvexResidual(body, 0.25, shortcut), x[0]) <= 0.75 * 0.5 + 0.25 * 2.0
    assert gain(Residual(nn.Identity()), x[0]) == pytest.approx(2.0)  # attained


@pytest.mark.parametrize("make", [Residual, ConvexResidual])
def test_plain_module(make, records_independent, finite_at_degenerate, plain_module):
    layer = make(nn.Sequential(nn.Linear(5, 5), nn.ReLU()))
    records_independent(layer, torch.randn(4, 5))
    finite_at_degenerate(layer, (5,))
    plain_module(layer, torch.randn(4, 5))


@pytest.mark.parametrize("weight", [-0.1, 1.1, math.nan])
def test_errors(weight):
    with pytest.raises(WeightclipError, match="weight"):
        ConvexResidual(nn.Identity(), weight)
