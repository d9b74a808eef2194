"""Dense layers: a cap is exact per-record clipping."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from weightclip.factors._dense import _CACHE, dense_product, position_gram


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)])
@pytest.mark.parametrize("beta", [1.0, 0.3, 4.0])
def test_a_cap_is_exact_clipping(shape, beta, made_private, exact):
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    x, d = torch.randn(9, *shape), torch.randn(9, *shape[:-1], 4)
    native = exact(layer, x, d, beta)
    norms = native.norm(dim=1)
    cap = float(norms.median())
    got = exact(made_private(layer, cap=cap, beta=beta), x, d, beta)
    torch.testing.assert_close(got, native * (cap / norms).clamp(max=1).unsqueeze(1), rtol=2e-5, atol=1e-6)
    assert float(got.norm(dim=1).max()) > 0.999 * cap


def test_radii_scale_what_exceeds_them(made_private, exact):
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    x, d = torch.randn(9, 6), torch.randn(9, 4)
    native = exact(layer, x, d, 1.0)
    x_norm, d_norm = (x.square().sum(1) + 1).sqrt(), d.norm(dim=1)
    radius, cotangent = float(x_norm.median()), float(d_norm.median())
    scale = (radius / x_norm).clamp(max=1) * (cotangent / d_norm).clamp(max=1)
    got = exact(made_private(layer, radius=radius, cotangent=cotangent), x, d, 1.0)
    torch.testing.assert_close(got, native * scale.unsqueeze(1), rtol=1e-5, atol=1e-6)


def test_position_gram_is_the_norm():
    torch.manual_seed(0)
    x, d = torch.randn(4, 7, 5), torch.randn(4, 7, 3)
    full = torch.cat([x, torch.full((4, 7, 1), 0.4)], 2)
    want = torch.einsum("bsi,bso->bio", full.double(), d.double()).flatten(1).norm(dim=1)
    got = position_gram(x, d, 0.4).double()
    assert bool((got >= want).all())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("places", [(), (3,)])
def test_wide_products_in_blocks_are_the_whole_sum(places):
    # more rows than one block holds, and a last block that is not full
    x, d = torch.randn(197, *places, 9000), torch.randn(197, *places, 3)
    assert max(64, _CACHE // 9000) < 197
    scale = torch.rand(197)
    scale[5], x[5], d[7] = 0.0, math.nan, 0.0  # a dropped record leaves no trace
    weighted = torch.where((scale > 0).view(-1, *(1,) * (d.dim() - 1)), d * scale.view(-1, *(1,) * (d.dim() - 1)), 0.0)
    expected = torch.einsum("...o,...i->oi", weighted.double(), x.nan_to_num(0.0).double())
    found = dense_product(x, d, scale, torch.float64, 0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
