"""The collector: one limit per record over all uses of a layer, or over all layers (joint cap)."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from weightclip import nn as wnn
from weightclip.errors import ContractError
from weightclip.factors import CapNorm, Collector, Entry, make_layer_private


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), wnn.SafeGroupNorm(1, 2, affine=True), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)
    )


def collected(net: nn.Module, thresholds: dict[int, float], caps: int = CapNorm.CHEAPEST, beta: float = 1.0):
    """A private copy under a joint cap, and where its gradients go."""
    net = copy.deepcopy(net)
    found: dict[int, torch.Tensor] = {}
    parameters = list(net.parameters())

    def add(place, gradient):
        key = id(parameters[place])
        found[key] = found.get(key, 0) + gradient

    collector = Collector(add, caps)
    for i, threshold in thresholds.items():
        make_layer_private(net[i], beta=beta)
        places = [next(k for k, q in enumerate(parameters) if q is p) for p in (net[i].weight, net[i].bias)]
        collector.enter(Entry(net[i], *places, joint=threshold))
    return net, found, collector


def backward(collector: Collector, value: torch.Tensor, rows: int) -> None:
    with collector.collection(rows):
        value.backward()


def whole(net, found, thresholds, beta) -> float:
    """sum_k ||g_k||^2 / t_k^2 of what was delivered."""
    total = 0.0
    for i, t in thresholds.items():
        for name, q in net[i].named_parameters():
            total += float((found[id(q)].double() * (beta if name == "bias" else 1.0) / t).square().sum())
    return total


THRESHOLDS = {0: 0.5, 1: 0.2, 4: 2.0}


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e-3, 1.0, 1e3, 1e9, 1e18])
@pytest.mark.parametrize("caps", list(CapNorm))
def test_one_record_keeps_the_joint_cap(size, caps):
    net, found, collector = collected(model(), THRESHOLDS, caps, beta=0.7)
    x = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    backward(collector, (net(x) * torch.tensor([[1.0, -2.0, 0.5]]) * size).sum(), 1)
    total = whole(net, found, THRESHOLDS, 0.7)
    assert total <= 1 + 1e-4
    if size >= 1e3 and caps >= CapNorm.POSITION:
        assert total > 0.99  # exact


def test_records_that_are_not_finite_contribute_nothing():
    x = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    net, want, collector = collected(model(), THRESHOLDS)
    backward(collector, net(x[:2]).sum(), 2)
    for bad in (math.nan, math.inf):
        poisoned = x.clone()
        poisoned[2, 0, 0, 0] = bad
        twin, got, collector = collected(model(), THRESHOLDS)
        backward(collector, twin(poisoned).sum(), 3)
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(got[id(b)], want[id(a)], rtol=1e-6, atol=1e-7)


def test_a_layer_used_twice_adds_up_before_squaring():
    layer = nn.Linear(3, 3)
    net, found, collector = collected(nn.Sequential(layer, nn.Tanh()), {0: 0.1})
    x = torch.randn(1, 3)
    backward(collector, (100 * net[0](torch.tanh(net[0](x)))).sum(), 1)
    assert whole(net, found, {0: 0.1}, 1.0) <= 1 + 1e-4


def test_factors_left_by_a_failed_backward_are_dropped():
    net, found, collector = collected(model(), THRESHOLDS)
    x = torch.randn(2, 1, 4, 4)

    def fail(g):
        raise RuntimeError("out of memory, say")

    y = net[0](x)
    y.register_hook(fail)
    with pytest.raises(RuntimeError, match="say"):
        backward(collector, net[1:](y).sum(), 2)
    assert not found
    backward(collector, net(x[:1]).sum(), 1)  # another batch size: old factors would not fit
    assert len(found) == 6


def test_copies_leave_the_engine_behind():
    net, _, _ = collected(model(), THRESHOLDS)
    twin = copy.deepcopy(net)
    twin(torch.randn(2, 1, 4, 4)).sum().backward()
    assert all(q.grad is not None for q in twin.parameters())


def test_outside_a_collection_products_are_refused():
    net, found, _ = collected(model(), THRESHOLDS)
    with pytest.raises(ContractError, match="outside the private loss"):
        net(torch.randn(2, 1, 4, 4)).sum().backward()
    assert not found and all(q.grad is None for q in net.parameters())


def alone(cap: float, uses: int, exact: bool = True):
    """One dense layer with a limit of its own."""
    torch.manual_seed(0)
    layer, found = nn.Linear(3, 3), {}
    make_layer_private(layer, cap=cap, bound=not exact)
    collector = Collector(lambda place, g: found.__setitem__(place, found.get(place, 0) + g))
    collector.enter(Entry(layer, 0, 1, uses))
    return layer, found, collector


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("uses", "taken"), [(1, 1), (3, 3), (3, 7), (1, 7)])
def test_all_uses_share_one_limit(uses, taken, exact):
    """SOUNDNESS 7 (a): seven uses of a layer limited one by one moved the sum by seven limits."""
    layer, found, collector = alone(0.5, uses, exact)
    x = torch.ones(1, 3)
    backward(collector, 100 * sum(layer(x) for _ in range(taken)).sum(), 1)
    moved = math.sqrt(float(found[0].square().sum() + found[1].square().sum()))
    assert 0.499 <= moved <= 0.5 * (1 + 1e-5)


def test_uses_within_the_limit_are_left_alone():
    layer, found, collector = alone(50.0, 3)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    backward(collector, sum(layer(k * x) for k in range(3)).sum(), 4)
    torch.testing.assert_close(found[0].float(), (3 * x).sum(0).expand(3, 3))


def test_rows_that_are_not_records_are_refused():
    """SOUNDNESS 7 (b): 32 positions folded into the batch, taken for records, moved the sum by 32 limits."""
    layer, found, collector = alone(0.5, 1)
    x = torch.randn(2, 4, 3)
    with pytest.raises(ContractError, match="rows of a product must be records"):
        backward(collector, layer(x.flatten(0, 1)).sum(), 2)
    assert not found


def test_second_derivatives_are_refused():
    """SOUNDNESS 7 (c): a gradient penalty went through the product without its limit."""
    layer, _, _ = alone(0.5, 1)
    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(ContractError, match="create_graph"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)


def test_only_the_parameter_itself_sits_in_a_private_layer():
    layer, _, _ = alone(0.5, 1)
    with pytest.raises(ContractError, match="in place of its parameter"):
        torch.func.functional_call(layer, {"weight": 8 * layer.weight}, (torch.ones(1, 3),))
