"""The arithmetic of bounds, and where rules are found."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import weightclip as wc
from weightclip.bounds import Edge, Effect, Op, layer_rule, least, module_rule, operator_rule, plus, root, times
from weightclip.bounds._rule import _REGISTRY, root_sum
from weightclip.certificate._graph import trace
from weightclip.errors import CertificationError

T = torch.tensor


def test_products_and_sums_of_bounds():
    assert times(2.0, 3.0) == 6.0
    assert math.isinf(times(math.inf, 3.0)) and math.isinf(times(T(2.0), math.inf))
    assert times(math.inf, 0.0) == 0.0 and times(0.0, T(5.0)) == 0.0  # an exact zero blocks: token ids have no gradient
    assert math.isinf(plus(1.0, math.inf, T(2.0)))
    assert float(plus(0.0, T(2.0), 1.0)) == 3.0 and plus() == 0.0
    assert float(root(T(9.0))) == 3.0 and root(4.0) == 2.0
    assert root_sum([3.0, 4.0]) == 5.0 and math.isinf(root_sum([3.0, math.inf]))


def test_the_least_bound():
    assert least(3.0, 2.0, math.inf) == 2.0
    assert float(least(T(3.0), 2.0)) == 2.0 and float(least(T(1.0), math.inf, T(4.0))) == 1.0
    assert math.isnan(float(least(T(math.nan), 2.0)))  # never a guess


def test_output_of_an_effect():
    assert Effect((2.0,), offset=1.0).output([3.0]) == 7.0
    assert Effect((2.0,), offset=1.0, ceiling=5.0).output([3.0]) == 5.0
    assert Effect((1.0, 1.0)).output([3.0, 4.0]) == 7.0
    assert Effect((1.0, 1.0), root=True).output([3.0, 4.0]) == 5.0
    assert Effect((math.inf,), ceiling=2.0).output([3.0]) == 2.0
    with pytest.raises(ValueError):
        Effect((1.0,)).output([1.0, 2.0])


def test_arguments_by_place_or_name():
    op = Op("n", "aten.x.default", (Edge(0), 3), {"dim": 2}, ((4,),), (4,))
    assert op.arg(1, "other") == 3 and op.arg(2, "dim") == 2 and op.arg(3, "missing", 9) == 9
    error = op.refuse("because", "do that")
    assert isinstance(error, CertificationError) and str(error) == "node 'n' (aten.x.default): because. Fix: do that."


@pytest.fixture
def registry():
    before = dict(_REGISTRY.operators), dict(_REGISTRY.modules)
    yield
    _REGISTRY.operators, _REGISTRY.modules = before


def test_a_registered_module_becomes_one_node(registry):
    class Wave(nn.Module):
        def forward(self, x):
            return torch.erfinv(torch.tanh(x) / 4)

    model = nn.Sequential(nn.Linear(3, 3), Wave())
    with pytest.raises(CertificationError, match="erfinv.*register_rule"):
        trace(model, torch.zeros(2, 3))
    wc.register_rule(Wave, lambda op, p: Effect((0.5,), ceiling=1.0))
    graph = trace(model, torch.zeros(2, 3))
    assert [n.op.kind for n in graph.nodes] == ["input", "Linear", "Wave"]


def test_a_registered_operator(registry):
    @wc.register_rule(torch.ops.aten.erfinv)
    def rule(op, p):
        return Effect((math.inf,))

    assert operator_rule(torch.ops.aten.erfinv.default) is rule
    assert wc.register_rule(torch.ops.aten.erfinv.default, operator_rule(torch.ops.aten.relu)) is not rule
    assert operator_rule(torch.ops.aten.erfinv.default) is operator_rule(torch.ops.aten.relu)  # the overload goes first


def test_a_registered_module_must_not_hold_trainable_parameters(registry):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return self.inner(x)

    wc.register_rule(Hidden, lambda op, p: Effect((1.0,)))
    with pytest.raises(CertificationError, match="Hidden.*trainable parameters.*freeze"):
        trace(Hidden(), torch.zeros(2, 3))
    trace(Hidden().requires_grad_(False), torch.zeros(2, 3))


def test_rules_are_for_modules_that_compute_what_their_type_computes():
    class Renamed(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)

    class Louder(nn.Linear):
        def forward(self, x):
            return 100 * super().forward(x)

    class Inner(nn.Conv2d):
        def _conv_forward(self, *args):
            return 100 * super()._conv_forward(*args)

    class Caller(nn.Linear):
        def __call__(self, x):
            return 100 * super().__call__(x)

    assert layer_rule(Renamed()) is not None
    assert layer_rule(Louder(3, 3)) is None and layer_rule(Inner(1, 1, 1)) is None and layer_rule(Caller(3, 3)) is None
    patched = nn.Linear(3, 3)
    patched.forward = lambda x: 100 * x  # type: ignore[method-assign]
    assert layer_rule(patched) is None
    project = wc.nn.Project(1.0)
    assert module_rule(project) is not None
    project.forward = lambda x: x  # type: ignore[method-assign]
    assert module_rule(project) is None


def test_a_patched_layer_is_refused_by_its_parameter():
    model = nn.Sequential(nn.Linear(3, 3))
    layer = model[0]
    layer.forward = lambda x: 100 * torch.nn.functional.linear(x, layer.weight, layer.bias)
    with pytest.raises(CertificationError, match="0.weight"):
        trace(model, torch.zeros(2, 3))
