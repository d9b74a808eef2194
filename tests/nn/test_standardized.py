"""Weight standardisation: effective kernel, its bound, and the pull-back of a noisy gradient."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weightclip.errors import WeightclipError
from weightclip.nn import StandardizedConv2d


def test_effective_weight_formula():
    conv = StandardizedConv2d(4, 6, 3, groups=2, floor=1e-3, gain=1.5).double()
    w = conv.weight.detach().flatten(1)
    expected = 1.5 * (w - w.mean(1, keepdim=True)) / (w.std(1, correction=0, keepdim=True) * math.sqrt(18))
    torch.testing.assert_close(conv.effective_weight().flatten(1), expected)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(conv(x), F.conv2d(x, expected.view(6, 2, 3, 3), conv.bias, groups=2))


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e-3, 1.0, 1e6])
def test_row_norms_never_exceed_the_gain(scale):
    conv = StandardizedConv2d(3, 5, 3, floor=1e-2, gain=2.0).double()
    with torch.no_grad():
        conv.weight.copy_(scale * torch.randn_like(conv.weight) + scale)
    assert conv.effective_weight().flatten(1).norm(dim=1).max() <= 2.0 * (1 + 1e-12)


@pytest.mark.parametrize("scale", [1e-3, 0.05, 1.0])  # below the floor, around it, above it
def test_pull_back_is_the_transposed_jacobian(scale):
    conv = StandardizedConv2d(2, 3, 3, floor=0.05, gain=0.7).double()
    with torch.no_grad():
        conv.weight.copy_(scale * torch.randn_like(conv.weight))
    g = torch.randn_like(conv.weight)
    (expected,) = torch.autograd.grad(conv.effective_weight(), conv.weight, g)
    torch.testing.assert_close(conv.pull_back(g), expected)
    assert expected.norm() <= 0.7 / (0.05 * math.sqrt(18)) * g.norm()
    assert not conv.pull_back(g).requires_grad


def test_pull_back_at_zero_weights_is_finite():
    conv = StandardizedConv2d(2, 3, 3)
    nn.init.zeros_(conv.weight)
    assert conv.pull_back(torch.randn_like(conv.weight)).isfinite().all()
    conv(torch.randn(2, 2, 4, 4)).sum().backward()
    assert conv.weight.grad is not None and conv.weight.grad.isfinite().all()


def test_native_class_and_state_dict():
    conv, plain = StandardizedConv2d(2, 3, 3), nn.Conv2d(2, 3, 3)
    assert isinstance(conv, nn.Conv2d)
    conv.load_state_dict(plain.state_dict())
    assert torch.equal(conv.weight, plain.weight)


@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1, "bias": False}, {"padding": "same"}])
def test_plain_module(options, records_independent, finite_at_degenerate, plain_module):
    conv = StandardizedConv2d(2, 3, 3, **options)
    records_independent(conv, torch.randn(4, 2, 6, 6))
    finite_at_degenerate(conv, (2, 6, 6))
    plain_module(conv, torch.randn(4, 2, 6, 6))


def test_errors():
    with pytest.raises(WeightclipError, match="floor"):
        StandardizedConv2d(2, 3, 3, floor=0.0)
    with pytest.raises(WeightclipError, match="gain"):
        StandardizedConv2d(2, 3, 3, gain=-1.0)
