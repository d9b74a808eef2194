"""Projection on the ball and floored unit norm: bounds, gains, non-finite records."""

from __future__ import annotations

import math

import pytest
import torch

from weightclip.errors import WeightclipError
from weightclip.nn import Project, UnitNorm


@pytest.mark.parametrize("radius", [0.1, 1.0, 30.0])
def test_project_is_the_euclidean_projection(radius):
    x = 10 * torch.randn(64, 3, 4, dtype=torch.float64) * torch.rand(64, 1, 1, dtype=torch.float64)
    y = Project(radius)(x)
    norms = x.flatten(1).norm(dim=1)
    inside = norms <= radius
    assert torch.equal(y[inside], x[inside])  # exactly the identity inside the ball
    expected = x[~inside] * (radius / norms[~inside]).view(-1, 1, 1)
    torch.testing.assert_close(y[~inside], expected)


@pytest.mark.parametrize("size", [0.0, 1e-3, 0.999, 1.0, 1.001, 5.0, 1e8])
def test_gains(size, gain):
    n, radius, floor = 6, 1.7, 0.3
    loose = (1 + math.sqrt(n)) / 2
    for spike in (0.0, 5.0):
        direction = torch.randn(2, 3, dtype=torch.float64)
        direction[0, 0] += spike
        direction /= direction.norm()
        at_radius, at_floor = size * radius * direction, size * floor * direction
        assert gain(Project(radius), at_radius) <= 1 + 1e-9
        assert gain(UnitNorm(floor), at_floor) <= (1 + 1e-9) / floor
        for p in (1, math.inf):
            assert gain(Project(radius), at_radius, p) <= loose + 1e-9
            assert gain(Project(radius, detach=True), at_radius, p) <= 1 + 1e-9
            assert gain(UnitNorm(floor), at_floor, p) <= loose / floor * (1 + 1e-9)
            assert gain(UnitNorm(floor, detach=True), at_floor, p) <= (1 + 1e-9) / floor


def test_infinity_gain_of_the_projection_exceeds_one(gain):
    """Why `detach` exists: the worst direction for n = 9 attains (1 + sqrt 9) / 2 just outside the ball."""
    n = 9
    t = (1 + 1 / math.sqrt(n)) / 2  # diagonal entry of I - u u^T at the worst row
    u = torch.full((n,), math.sqrt(t / (n - 1)), dtype=torch.float64)
    u[0] = math.sqrt(1 - t)
    assert gain(Project(1.0), u * (1 + 1e-9), math.inf) == pytest.approx(2.0, abs=1e-6)


def test_lipschitz_between_far_points():
    x, y = 3 * torch.randn(2, 500, 7, dtype=torch.float64)
    moved = (Project(1.3)(x) - Project(1.3)(y)).norm(dim=1)
    assert (moved <= (x - y).norm(dim=1) * (1 + 1e-12)).all()


def test_detach_changes_the_gradient_only():
    x = 5 * torch.randn(3, 4)
    assert torch.equal(Project(1.0)(x), Project(1.0, detach=True)(x))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    c = torch.randn_like(x)
    Project(1.0)(a).backward(c)
    Project(1.0, detach=True)(b).backward(c)
    torch.testing.assert_close(b.grad, c / x.norm(dim=1, keepdim=True))
    assert not torch.allclose(a.grad, b.grad)


@pytest.mark.parametrize("layer", [Project(2.0), Project(2.0, detach=True), UnitNorm(0.5)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_non_finite_records_become_zeros(layer, bad):
    x = torch.randn(3, 4)
    x[1, 2] = bad
    x.requires_grad_()
    y = layer(x)
    assert torch.equal(y[1], torch.zeros(4))
    y.sum().backward()
    assert torch.equal(x.grad[1], torch.zeros(4))
    assert x.grad.isfinite().all() and x.grad[[0, 2]].abs().sum() > 0


@pytest.mark.parametrize(
    "dtype,slack", [(torch.float32, 1e-5), (torch.bfloat16, 2**-8), (torch.float16, 2**-10), (torch.float64, 1e-12)]
)
def test_output_bound_in_every_dtype(dtype, slack):
    x = (torch.randn(32, 500) * torch.logspace(-3, 3, 32).unsqueeze(1)).to(dtype)
    for layer, bound in ((Project(0.7), 0.7), (UnitNorm(0.2), 1.0)):
        y = layer(x)
        assert y.dtype == dtype
        assert y.double().norm(dim=1).max() <= bound * (1 + slack)


@pytest.mark.parametrize("layer", [Project(0.5), Project(0.5, detach=True), UnitNorm(0.1)])
def test_plain_module(layer, records_independent, finite_at_degenerate, plain_module):
    records_independent(layer, torch.randn(4, 3, 5))
    finite_at_degenerate(layer, (3, 5))
    plain_module(layer, torch.randn(4, 3, 5))


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_errors(value):
    with pytest.raises(WeightclipError, match="radius"):
        Project(value)
    with pytest.raises(WeightclipError, match="floor"):
        UnitNorm(value)
    with pytest.raises(WeightclipError, match="records"):
        Project(1.0)(torch.zeros(4))
