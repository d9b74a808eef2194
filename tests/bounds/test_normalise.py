"""Normalisation layers, projections and fixed maps."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weightclip import nn as wnn
from weightclip.bounds import Numerics
from weightclip.certificate._graph import trace
from weightclip.errors import CertificationError

SAFE = {
    "group": (lambda a: wnn.SafeGroupNorm(2, 4, alpha=0.5, affine=a), (4, 3)),
    "instance": (lambda a: wnn.SafeInstanceNorm(3, alpha=0.7, affine=a), (3, 4)),
    "layer": (lambda a: wnn.SafeLayerNorm(4, alpha=0.3, affine=a), (2, 4)),
    "layer of two dimensions": (lambda a: wnn.SafeLayerNorm((2, 3), alpha=1.0, affine=a), (2, 2, 3)),
}
PLAIN = {
    "group": (lambda a: nn.GroupNorm(2, 4, affine=a), (4, 3)),
    "layer": (lambda a: nn.LayerNorm(4, elementwise_affine=a), (2, 4)),
}


def _scrambled(module: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    for q in module.parameters():
        nn.init.normal_(q, std=1.5)
    return module


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("name", SAFE)
def test_safe_norms(name, affine, tried):
    make, shape = SAFE[name]
    found = tried(_scrambled(make(affine)), shape)
    assert found.output > 0.5


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_norms_warn_and_hold(name, affine, tried):
    make, shape = PLAIN[name]
    with pytest.warns(UserWarning, match="316"):
        tried(_scrambled(make(affine)), shape)


@pytest.mark.parametrize("kind", ["safe", "plain"])
@pytest.mark.parametrize("name", ["group", "layer"])
def test_factor_of_the_affine_part(kind, name):
    make, shape = (SAFE if kind == "safe" else PLAIN)[name]
    module = _scrambled(make(True)).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        node = trace(module, torch.zeros(2, *shape, dtype=torch.float64)).nodes[-1]
    names = [n for n, _ in module.named_parameters()]
    values = [q.detach() for _, q in module.named_parameters()]
    worst = 0.0
    for seed in range(6):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10
        if seed > 2:  # one entry carries the spread
            x = torch.zeros_like(x)
            x.view(-1)[seed] = 50.0
        blocks = torch.autograd.functional.jacobian(
            lambda *new, x=x: torch.func.functional_call(
                module, dict(zip(names, new, strict=True)), (x.unsqueeze(0),)
            ).flatten(),
            tuple(values),
        )
        j = torch.cat([b.flatten(1) * (0.6 if n == "bias" else 1.0) for n, b in zip(names, blocks, strict=True)], 1)
        for p, exact in ((2, float(torch.linalg.matrix_norm(j, 2))), (math.inf, float(j.norm(dim=1).max()))):
            bound = float(node.layer.factor(module, node.op, float(x.norm()), 0.6, p))
            assert exact <= bound * (1 + 1e-9)
            worst = max(worst, exact / bound)
    assert worst > 0.6


@pytest.mark.parametrize("size", [1e4, 1e6, 12345678.0, 3e8])
def test_plain_norms_of_large_constant_inputs(size):
    """float32 divides rounding errors by sqrt(eps): the computed output exceeds sqrt(numel), not the bound."""
    shape = (3, 5, 7)
    x = torch.full((1, *shape), size)
    x[0, 0, 0, 0] *= 1 + 3e-7
    for module in (nn.GroupNorm(1, 3, affine=False), nn.LayerNorm(shape, elementwise_affine=False)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            node = trace(module, torch.zeros(2, *shape)).nodes[-1]
        gain = node.layer.gain(module, node.op, 2, Numerics())
        assert float(module(x).norm()) <= float(node.layer.output(module, node.op, gain, float(x.norm())))
        assert math.isinf(node.layer.output(module, node.op, gain, math.inf))  # no free bound for a plain norm
    safe = wnn.SafeGroupNorm(1, 3)
    node = trace(safe, torch.zeros(2, *shape)).nodes[-1]
    assert float(safe(x).norm()) <= float(node.layer.output(safe, node.op, 1.0, math.inf))


@pytest.mark.parametrize("module, shape", [
    (wnn.Project(1.5), (4,)), (wnn.Project(0.2), (2, 3)), (wnn.UnitNorm(0.3), (4,)), (wnn.GroupSort(2), (4, 2)),
    (wnn.MaxMin(), (4,)), (wnn.BlurPool2d(), (1, 4, 4)), (wnn.BlurPool2d(4, stride=3, unit_gain=True), (1, 5, 5)),
    (wnn.NormPool2d(2), (1, 4, 4)), (wnn.ScaledAvgPool2d(2), (1, 4, 4)), (wnn.Abs(), (3,)),
])  # fmt: skip
def test_fixed_maps(module, shape, tried):
    found = tried(module, shape)
    assert max(found.gain.values()) > 0.45


def test_scattering(tried):
    tried(wnn.Scattering2d(J=1, shape=(6, 6), L=2, max_order=1), (1, 6, 6), exponents=(2,))


@pytest.mark.parametrize("p", [1, math.inf])
def test_projection_with_a_detached_scale(p):
    """Its backward multiplies the cotangent by a number in (0, 1]: non-expansive in every norm."""
    module = wnn.Project(0.5, detach=True).double()
    node = trace(module, torch.zeros(2, 5, dtype=torch.float64)).nodes[-1]
    assert node.rule(node.op, p).gains == (1.0,)
    x = torch.randn(1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    d = torch.tensor([[1.0, -1, 1, -1, 1]], dtype=torch.float64)
    (g,) = torch.autograd.grad(module(x), x, d)
    dual = 1 if math.isinf(p) else math.inf
    assert float(g.norm(dual)) <= float(d.norm(dual))


def test_functional_norms(tried, traced):
    tried(lambda x: F.layer_norm(x, (4,)), (2, 4))
    tried(lambda x: F.group_norm(x, 2), (4, 3))
    for function in (
        lambda self, x: F.layer_norm(x, (4,), self.w),
        lambda self, x: F.layer_norm(x, (4,), None, self.w),
        lambda self, x: F.layer_norm(x, (4,), eps=0.0),
        lambda self, x: F.instance_norm(x),
    ):
        with pytest.raises(CertificationError):
            traced(function, (2, 4), w=torch.ones(4))


def test_a_subclass_that_normalises_otherwise_shows_its_operators(tried):
    class Louder(wnn.SafeGroupNorm):
        def normalise(self, x):
            return torch.tanh(x) * 100

    assert tried(Louder(1, 4), (4, 2)).gain[2] > 0.99  # gain 100, not 1/alpha
