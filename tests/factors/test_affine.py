"""The affine part of normalisation layers."""

from __future__ import annotations

import pytest
import torch

from weightclip.factors import _affine
from weightclip.factors._affine import AffineFunction, affine_record_norm


@pytest.mark.parametrize("name", ["safe group norm", "safe layer norm", "group norm", "layer norm"])
def test_a_cap_is_exact_clipping(name, cases, made_private, exact):
    case = cases[name]
    layer = case.layer()
    x = case.inputs(8)
    d = torch.randn_like(layer(x)).detach()
    native = exact(layer, x, d, 0.5)
    norms = native.norm(dim=1)
    cap = float(norms.median())
    got = exact(made_private(layer, cap=cap, beta=0.5), x, d, 0.5)
    torch.testing.assert_close(got, native * (cap / norms).clamp(max=1).unsqueeze(1), rtol=2e-4, atol=1e-5)


def test_the_largest_channel_bounds_the_factor(cases, made_private, exact):
    """A radius is on the largest channel: all cotangent in one channel attains it."""
    case = cases["safe group norm"]
    layer = case.layer()
    x = case.inputs(1)
    channel = layer.normalise(x).square().sum((0, 2, 3)).argmax()
    d = torch.zeros_like(layer(x)).detach()
    d[:, channel] = layer.normalise(x)[:, channel]
    d = d / d.norm()
    got = float(exact(made_private(layer, radius=0.1, beta=1e-3), x, d, 1e-3).norm())
    assert 0.0999 < got <= 0.1 * (1 + 1e-5)


def test_record_norms_do_not_cancel():
    """Two positions whose contributions cancel to 2^-20 of their size: float32 sums lose it."""
    x = torch.tensor([[[1.0, -1.0 - 2.0**-20] * 50]])
    d = torch.ones_like(x) * 1e4
    got = float(affine_record_norm(x, d, [2], 0.0))
    assert got >= float((x.double() * d.double()).sum((1, 2)).abs())


@pytest.mark.parametrize("shape", [(5, 6), (5, 6, 3), (5, 6, 2, 3)])
def test_the_kernels_way_takes_records_with_and_without_positions(shape, monkeypatch):
    """The kernel itself is in tests/factors/kernels/test_products.py; here a stand-in that asks for its shapes."""

    def sums(d, scale, x):
        assert d.shape == x.shape == (*shape[:2], max(1, torch.Size(shape[2:]).numel()))
        return torch.stack([(d.double()).sum((0, 2)), (d.double() * x.double()).sum((0, 2))])

    x, d = torch.randn(shape), torch.randn(shape)
    weight, bias = torch.ones(6, requires_grad=True), torch.zeros(6, requires_grad=True)

    def gradients():
        y = AffineFunction.apply(x, weight, bias, None, 0, torch.full((3,), torch.inf), 0, 1.0, 1)
        return torch.autograd.grad(y, [weight, bias], d)

    expected = gradients()
    monkeypatch.setattr(_affine, "fits", lambda *_: True)
    monkeypatch.setattr(_affine, "record_sums", sums)
    torch.testing.assert_close(gradients(), expected)
