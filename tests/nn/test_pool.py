"""Pooling: values, gains against exact Jacobians, attained bounds."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from weightclip.errors import WeightclipError
from weightclip.nn import BlurPool2d, L2Pool2d, NormPool2d, ScaledAvgPool2d


@pytest.mark.parametrize("unit_gain", [False, True])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4, 5])
def test_blur_gain_is_a_bound_and_is_approached(kernel_size, stride, unit_gain, gain):
    layer = BlurPool2d(kernel_size, stride, unit_gain).double()
    for p in (1, 2, math.inf):
        for size in (4, 12, 13):
            reached = gain(layer, torch.zeros(1, size, size, dtype=torch.float64), p)
            assert reached <= layer.operator_norm(p) * (1 + 1e-12)
        assert reached >= 0.85 * layer.operator_norm(p)
    if unit_gain:
        assert layer.gain == pytest.approx(1.0)


def test_blur_values():
    assert BlurPool2d(3, 2).operator_norm(1) == 0.25
    assert BlurPool2d(3, 2).operator_norm(math.inf) == 1.0
    x = torch.zeros(1, 2, 5, 5)
    x[0, 1, 2, 2] = 16.0
    y = BlurPool2d(3, 1)(x)
    assert torch.equal(y[0, 1, 1:4, 1:4], torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]))
    assert not y[0, 0].any()  # channels are not mixed
    assert not BlurPool2d().state_dict()


@pytest.mark.parametrize("kernel_size", [1, 2, 3])
@pytest.mark.parametrize("scale", [0.0, 1e-9, 1e-6, 1.0, 1e5])
def test_norm_pool(kernel_size, scale, gain):
    layer = NormPool2d(kernel_size)
    x = scale * torch.randn(2, 7, 6, dtype=torch.float64)
    y = layer(x.unsqueeze(0))[0]
    exact = F.unfold(x.unsqueeze(1), kernel_size, stride=kernel_size).norm(dim=1).view_as(y)
    assert (y <= exact * (1 + 1e-12)).all() and (exact - y <= layer.floor + 1e-12 * exact).all()
    assert y.norm() <= x.norm() * (1 + 1e-12)
    for p, bound in ((1, 1.0), (2, 1.0), (math.inf, kernel_size)):
        assert gain(layer, x, p) <= bound * (1 + 1e-9)


def test_norm_pool_in_half_precision_is_finite_at_zero():
    x = torch.zeros(1, 1, 2, 2, dtype=torch.float16, requires_grad=True)
    NormPool2d(2)(x).sum().backward()
    assert x.grad is not None and not x.grad.any()


def test_norm_pool_bounds_are_attained(gain):
    x = torch.ones(1, 4, 4, dtype=torch.float64)
    assert gain(NormPool2d(2), x) == pytest.approx(1.0)
    assert gain(NormPool2d(2), x, math.inf) == pytest.approx(2.0)
    assert L2Pool2d is NormPool2d


@pytest.mark.parametrize("kernel_size", [1, 2, 3])
def test_scaled_average(kernel_size, gain):
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    layer = ScaledAvgPool2d(kernel_size)
    torch.testing.assert_close(layer(x), F.avg_pool2d(x, kernel_size) * kernel_size)
    for p, bound in ((1, 1 / kernel_size), (2, 1.0), (math.inf, kernel_size)):
        assert gain(layer, x, p) == pytest.approx(bound)


@pytest.mark.parametrize("layer", [BlurPool2d(), BlurPool2d(4, 2, True), NormPool2d(2), ScaledAvgPool2d(2)], ids=repr)
def test_plain_module(layer, records_independent, finite_at_degenerate, plain_module):
    records_independent(layer, torch.randn(4, 3, 6, 6))
    finite_at_degenerate(layer, (3, 6, 6))
    plain_module(layer, torch.randn(4, 3, 6, 6))


def test_errors():
    for make in (BlurPool2d, NormPool2d, ScaledAvgPool2d):
        with pytest.raises(WeightclipError, match="kernel_size"):
            make(0)
    with pytest.raises(WeightclipError, match="floor"):
        NormPool2d(2, floor=0.0)
