"""Entrywise rules: the constant against a fine grid of derivatives, the output against its bound."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weightclip.bounds._elementwise import GELU, HARDSWISH, MISH, SILU
from weightclip.errors import CertificationError

# (function, whether the constant is attained up to 1e-3)
ACTIVATIONS = {
    "relu": (nn.ReLU(), True),
    "relu_": (lambda x: F.relu_(x + 0.0), True),
    "leaky": (nn.LeakyReLU(0.2), True),
    "leaky steep": (nn.LeakyReLU(-3.0), True),
    "leaky_": (lambda x: F.leaky_relu_(x + 0.0, 0.3), True),
    "tanh": (nn.Tanh(), True),
    "tanh_": (lambda x: torch.tanh_(x + 0.0), True),
    "abs": (torch.abs, True),
    "neg": (lambda x: -x, True),
    "sin": (torch.sin, True),
    "cos": (torch.cos, True),
    "sigmoid": (nn.Sigmoid(), True),
    "logsigmoid": (nn.LogSigmoid(), True),
    "relu6": (nn.ReLU6(), True),
    "relu6_": (lambda x: F.relu6(x + 0.0, inplace=True), True),
    "hardtanh": (nn.Hardtanh(-2.0, 3.0), True),
    "hardtanh away from 0": (nn.Hardtanh(1.0, 3.0), True),
    "hardsigmoid": (nn.Hardsigmoid(), True),
    "hardswish": (nn.Hardswish(), True),
    "gelu": (nn.GELU(), True),
    "gelu tanh": (nn.GELU(approximate="tanh"), True),
    "silu": (nn.SiLU(), True),
    "silu_": (lambda x: F.silu(x + 0.0, inplace=True), True),
    "mish": (nn.Mish(), True),
    "erf": (torch.erf, True),
    "selu": (nn.SELU(), True),
    "elu": (nn.ELU(0.5), True),
    "elu steep": (nn.ELU(2.5), True),
    "elu_": (lambda x: F.elu_(x + 0.0, 1.0), True),
    "celu": (nn.CELU(0.3), True),
    "softplus": (nn.Softplus(), True),
    "softplus early threshold": (nn.Softplus(beta=2.0, threshold=-1.0), True),
    "softplus sharp": (nn.Softplus(beta=5.0, threshold=1.0), True),
    "clamp": (lambda x: x.clamp(-0.5, 2.0), True),
    "clamp below": (lambda x: x.clamp(min=1.5), True),
    "clamp above": (lambda x: x.clamp(max=-1.5), True),
    "softmin of one": (lambda x: x.pow(1), True),
    "tanhshrink": (nn.Tanhshrink(), False),
    "identity": (nn.Identity(), True),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_constants_on_a_fine_grid(name, traced, tried):
    function, tight = ACTIVATIONS[name]
    graph = traced(function if isinstance(function, nn.Module) else (lambda x: function(x)), (1,))
    gain = math.prod(max(n.rule(n.op, 2.0).gains) for n in graph.nodes if n.rule is not None) if len(graph.nodes) else 1
    x = torch.linspace(-40, 40, 400_001, dtype=torch.float64, requires_grad=True)
    y = function(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    if name == "tanhshrink":
        gain = 2.0  # x - tanh(x): the rules of a difference
    assert float(slope.abs().max()) <= gain * (1 + 1e-9)
    if tight:
        assert float(slope.abs().max()) >= 0.999 * gain
    tried(function if isinstance(function, nn.Module) else (lambda v: function(v)), (5,))


def test_named_constants():
    x = torch.linspace(-12, 12, 2_000_001, dtype=torch.float64, requires_grad=True)
    for constant, function in [
        (GELU, F.gelu),
        (GELU, lambda v: F.gelu(v, approximate="tanh")),
        (SILU, F.silu),
        (MISH, F.mish),
        (HARDSWISH, F.hardswish),
    ]:
        (slope,) = torch.autograd.grad(function(x).sum(), x)
        assert constant * 0.9998 <= float(slope.abs().max()) <= constant


@pytest.mark.parametrize("function", [torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.square, torch.reciprocal,
                                      lambda x: x**3, lambda x: 2**x])  # fmt: skip
def test_functions_without_a_finite_constant(function, traced):
    graph = traced(lambda x: function(x), (3,))
    effect = graph.nodes[-1].rule(graph.nodes[-1].op, 2.0)
    assert math.isinf(effect.gains[0])
    assert math.isinf(effect.output([0.0]))  # also at an input known to be zero: exp(0) is not 0


@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_dropout(p, traced):
    for module, rate in [(nn.Dropout(0.3), 0.3), (nn.Dropout(0.3, inplace=True), 0.3), (nn.Dropout(1.0), 1.0)]:
        node = traced(nn.Sequential(nn.Identity(), module), (4,)).nodes[-1]
        assert node.rule(node.op, p).gains == ((0.0,) if rate == 1 else (1 / (1 - rate),))
    node = traced(nn.Dropout2d(0.5), (2, 3, 3)).nodes[-1]
    assert node.rule(node.op, p).gains == (2.0,)
    still = traced(nn.Dropout(0.9).eval(), (4,))
    assert all(n.rule is None or n.rule(n.op, p).gains == (1.0,) for n in still.nodes)


def test_dropped_entries_grow_by_the_rule():
    module = nn.Dropout(0.75)
    torch.manual_seed(0)
    x = torch.ones(1, 1000)
    assert float(module(x).abs().max()) <= 1 / (1 - 0.75)


@pytest.mark.parametrize(
    "function, said",
    [
        (nn.CELU(-1.0), "alpha"),
        (lambda x: torch.clamp(x, x - 1, x + 1), "tensor"),
        (nn.Softplus(beta=-1.0), "beta"),
        (nn.RReLU(), "rrelu"),
        (nn.AlphaDropout(0.5), "alpha_dropout"),
        (nn.Hardshrink(), "hardshrink"),
    ],
)
def test_refused(function, said, traced):
    with pytest.raises(CertificationError, match=said):
        traced(function, (3,))


def test_prelu_is_refused_by_its_parameter(traced):
    with pytest.raises(CertificationError, match="1.weight"):
        traced(nn.Sequential(nn.Linear(3, 3), nn.PReLU()), (3,))
