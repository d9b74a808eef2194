"""The joint cap: one scale per record over all layers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from weightclip import nn as wnn
from weightclip.factors import CapNorm, JointCap, make_layer_private


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), wnn.SafeGroupNorm(1, 2, affine=True), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)
    )


def collected(net: nn.Module, thresholds: dict[int, float], caps: int = CapNorm.CHEAPEST, beta: float = 1.0):
    """A private copy under a joint cap, and where its gradients go."""
    net = copy.deepcopy(net)
    found: dict[int, torch.Tensor] = {}

    def deliver(parameter, gradient):
        found[id(parameter)] = found.get(id(parameter), 0) + gradient

    joint = JointCap({net[i]: t for i, t in thresholds.items()}, deliver, caps)
    for i in thresholds:
        make_layer_private(net[i], beta=beta, joint=joint)
    return net, found, joint


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
    net, found, _ = collected(model(), THRESHOLDS, caps, beta=0.7)
    x = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    (net(x) * torch.tensor([[1.0, -2.0, 0.5]]) * size).sum().backward()
    total = whole(net, found, THRESHOLDS, 0.7)
    assert total <= 1 + 1e-4
    if size >= 1e3 and caps >= CapNorm.POSITION:
        assert total > 0.99  # exact


def test_records_that_are_not_finite_contribute_nothing():
    x = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    net, want, _ = collected(model(), THRESHOLDS)
    net(x[:2]).sum().backward()
    for bad in (math.nan, math.inf):
        poisoned = x.clone()
        poisoned[2, 0, 0, 0] = bad
        twin, got, _ = collected(model(), THRESHOLDS)
        twin(poisoned).sum().backward()
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(got[id(b)], want[id(a)], rtol=1e-6, atol=1e-7)


def test_a_layer_used_twice_adds_up_before_squaring():
    layer = nn.Linear(3, 3)
    net, found, _ = collected(nn.Sequential(layer, nn.Tanh()), {0: 0.1})
    x = torch.randn(1, 3)
    (100 * net[0](torch.tanh(net[0](x)))).sum().backward()
    assert whole(net, found, {0: 0.1}, 1.0) <= 1 + 1e-4


def test_factors_left_by_a_failed_backward_are_dropped():
    net, found, joint = collected(model(), THRESHOLDS)
    x = torch.randn(2, 1, 4, 4)

    def fail(g):
        raise RuntimeError("out of memory, say")

    y = net[0](x)
    y.register_hook(fail)
    with pytest.raises(RuntimeError, match="say"):
        net[1:](y).sum().backward()
    assert not found and joint.uses
    net(x[:1]).sum().backward()  # another batch size: old factors would not fit
    assert len(found) == 6 and not joint.uses


def test_copies_leave_the_engine_behind():
    net, _, _ = collected(model(), THRESHOLDS)
    twin = copy.deepcopy(net)
    twin(torch.randn(2, 1, 4, 4)).sum().backward()
    assert all(q.grad is not None for q in twin.parameters())
