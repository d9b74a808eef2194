"""Norms of per-record gradients of convolutions: ordered, and never below the exact one."""

from __future__ import annotations

import torch
from torch import nn

from weightclip.factors._record_norms import CapNorm, Geometry, cheapest, conv_record_norm, patches


def test_patches_multiply_to_the_convolution():
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, (2, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2, bias=False).double()
    geometry = Geometry((2, 3), (2, 1), (1, 0), (1, 2), 2)
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    u = patches(x, geometry)
    y = layer.weight.flatten(1).unflatten(0, (2, 3)) @ u
    torch.testing.assert_close(y.flatten(1, 2), layer(x).flatten(2))


def test_order():
    torch.manual_seed(0)
    x, d = torch.randn(5, 4, 6), torch.randn(5, 6, 6)
    geometry = Geometry((3,), (1,), (1,), (1,), 2)
    free, channel, position, exact = (conv_record_norm(x, d, geometry, 0.5, k) for k in range(4))
    assert bool((exact <= channel * (1 + 1e-6)).all()) and bool((channel <= free * (1 + 1e-6)).all())
    torch.testing.assert_close(position, exact, rtol=1e-5, atol=0.0)


def test_the_cheapest_exact_way():
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
    few = cheapest(CapNorm.CHEAPEST, torch.zeros(1, 64, 2, 2), torch.zeros(1, 64, 2, 2), geometry)
    many = cheapest(CapNorm.CHEAPEST, torch.zeros(1, 2, 32, 32), torch.zeros(1, 4, 32, 32), geometry)
    assert (few, many) == (CapNorm.POSITION, CapNorm.EXACT)
    assert cheapest(CapNorm.FREE, torch.zeros(1), torch.zeros(1), geometry) == CapNorm.FREE


def test_no_records():
    geometry = Geometry((3,), (1,), (1,), (1,), 1)
    assert conv_record_norm(torch.zeros(0, 1, 4), torch.zeros(0, 1, 4), geometry, 1.0, 3).shape == (0,)
