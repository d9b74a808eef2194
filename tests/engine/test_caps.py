"""Caps: the joint cap is flat clipping, exact layer caps are per-layer clipping, cheap ones are sound bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.factors._record_norms import CapNorm, Geometry, conv_record_norm

EXACT_KINDS = (CapNorm.POSITION, CapNorm.EXACT, CapNorm.CHEAPEST)


def dense_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 9, bias=False), nn.Tanh(), nn.Linear(9, 3))


def conv_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2, groups=2, dilation=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


def records(conv: bool, n: int = 10) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    shape = (n, 2, 6, 6) if conv else (n, 7)
    return torch.randn(shape) * torch.logspace(-2, 1, n).view(-1, *(1,) * (len(shape) - 1)), torch.randint(0, 3, (n,))


def opacus_gradients(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Per-record gradients of every parameter, as Opacus computes them."""
    grad_sample = pytest.importorskip("opacus.grad_sample")
    wrapped = grad_sample.GradSampleModule(net, loss_reduction="sum")
    F.cross_entropy(wrapped(x.clone().requires_grad_()), y, reduction="sum").backward()
    found = {k.removeprefix("_module."): p.grad_sample.detach().double() for k, p in wrapped.named_parameters()}
    wrapped.to_standard_module()
    net.zero_grad()
    return found


def released(
    net: nn.Module, x: Tensor, y: Tensor, bounds: wc.Bounds, criterion: Any = None
) -> tuple[wc.PrivacyEngine, dict[str, Tensor]]:
    """Sums of the engine's gradients over the records, without noise."""
    engine = wc.PrivacyEngine()
    net, optimizer, loader, loss = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0), noise_multiplier=0.0, bounds=bounds,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)), criterion=criterion or nn.CrossEntropyLoss(),
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    for a, b in loader:
        optimizer.zero_grad()
        loss(net(a), b).backward()
        optimizer.step()
    return engine, {k: p.grad.double() * len(x) for k, p in net.named_parameters() if p.grad is not None}


def clipped(gradients: dict[str, Tensor], groups: list[list[str]], caps: list[float]) -> dict[str, Tensor]:
    """Sums of per-record gradients, each group of parameters clipped to its cap."""
    total = {}
    for names, cap in zip(groups, caps, strict=True):
        norm = torch.stack([gradients[k].flatten(1).square().sum(1) for k in names]).sum(0).sqrt()
        scale = (cap / norm).clamp(max=1)
        assert 0 < int((scale < 1).sum()) < len(scale)  # the cap bites on some records and not on others
        for k in names:
            total[k] = (gradients[k] * scale.view(-1, *(1,) * (gradients[k].dim() - 1))).sum(0)
    return total


def layers_of(gradients: dict[str, Tensor]) -> list[list[str]]:
    paths = dict.fromkeys(k.rsplit(".", 1)[0] for k in gradients)
    return [[k for k in gradients if k.rsplit(".", 1)[0] == p] for p in paths]


def typical(gradients: dict[str, Tensor], names: list[str]) -> float:
    """A cap that bites on half of the records."""
    return float(torch.stack([gradients[k].flatten(1).square().sum(1) for k in names]).sum(0).sqrt().median()) * 1.01


COUNTED = 1e-4  # norms of convolutions under caps of their own count the rounding of float32 products over positions


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor], rtol: float = 1e-5) -> None:
    assert mine.keys() == theirs.keys()
    for k in mine:
        torch.testing.assert_close(mine[k], theirs[k], rtol=rtol, atol=rtol * float(theirs[k].abs().max()))


def test_joint_cap_is_flat_clipping_on_a_dense_network():
    net, (x, y) = dense_net(), records(False)
    gradients = opacus_gradients(net, x, y)
    cap = typical(gradients, list(gradients))
    _, mine = released(net, x, y, wc.Bounds(joint_cap=cap))
    assert_equal(mine, clipped(gradients, [list(gradients)], [cap]))


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_joint_cap_is_flat_clipping_on_a_convolutional_network(kind):
    net, (x, y) = conv_net(), records(True)
    gradients = opacus_gradients(net, x, y)
    cap = typical(gradients, list(gradients))
    _, mine = released(net, x, y, wc.Bounds(joint_cap=cap, caps=kind))
    assert_equal(mine, clipped(gradients, [list(gradients)], [cap]), 1e-5)


@pytest.mark.parametrize("conv,kind", [(False, CapNorm.CHEAPEST), *((True, k) for k in EXACT_KINDS)])
def test_exact_layer_caps_are_per_layer_clipping(conv, kind):
    net, (x, y) = (conv_net() if conv else dense_net()), records(conv)
    gradients = opacus_gradients(net, x, y)
    groups = layers_of(gradients)
    caps = {g[0].rsplit(".", 1)[0]: typical(gradients, g) for g in groups}
    _, mine = released(net, x, y, wc.Bounds(layer_cap=caps, caps=kind))
    assert_equal(mine, clipped(gradients, groups, list(caps.values())), COUNTED if conv else 1e-5)


@pytest.mark.parametrize("kind", list(CapNorm))
@pytest.mark.parametrize("joint", [True, False])
def test_every_kind_keeps_one_record_within_the_certified_bound(kind, joint):
    """A data set of one record: what is released for it is its contribution."""
    x, y = records(True, 3)
    bounds = wc.Bounds(joint_cap=0.3, caps=kind) if joint else wc.Bounds(layer_cap=0.3, caps=kind)
    for i in range(len(x)):
        net = conv_net()
        gradients = opacus_gradients(net, x[i : i + 1], y[i : i + 1])
        engine, mine = released(net, x[i : i + 1], y[i : i + 1], bounds)
        norms = [math.sqrt(sum(float(mine[k].square().sum()) for k in group)) for group in layers_of(mine)]
        exact = [math.sqrt(sum(float(gradients[k].square().sum()) for k in group)) for group in layers_of(mine)]
        together = math.sqrt(sum(v * v for v in norms))
        certified = list(engine.certificate().sensitivities.values())
        assert all(v <= c for v, c in zip(norms, certified, strict=True))
        assert together <= certified[0] or not joint
        if kind in EXACT_KINDS:  # and no more is taken away than the cap asks for
            wanted = [min(v, 0.3) for v in exact] if not joint else None
            if wanted is not None:
                assert norms == pytest.approx(wanted, rel=COUNTED, abs=1e-9)
            else:
                assert together == pytest.approx(min(0.3, math.hypot(*exact)), rel=COUNTED)


@given(
    seed=st.integers(0, 2**31), stride=st.integers(1, 3), dilation=st.integers(1, 2), padding=st.integers(0, 2),
    groups=st.sampled_from([1, 2]), beta=st.sampled_from([0.0, 0.3, 2.0]), aligned=st.booleans(),
)  # fmt: skip
def test_kinds_are_ordered_and_never_below_the_exact_norm(seed, stride, dilation, padding, groups, beta, aligned):
    """free >= channel >= exact, and both exact ways agree with autograd, also where every position agrees."""
    torch.manual_seed(seed)
    conv = nn.Conv2d(4, 6, 3, stride, padding, dilation, groups).double()
    x = torch.ones(2, 4, 7, 7, dtype=torch.float64) if aligned else torch.randn(2, 4, 7, 7, dtype=torch.float64)
    out = conv(x)
    d = torch.ones_like(out) if aligned else torch.randn_like(out)
    geometry = Geometry((3, 3), (stride,) * 2, (padding,) * 2, (dilation,) * 2, groups)
    norms = {k: conv_record_norm(x, d, geometry, beta, k).double() for k in CapNorm}
    for i in range(2):
        conv.zero_grad()
        (conv(x[i : i + 1]) * d[i : i + 1]).sum().backward()
        assert conv.weight.grad is not None and conv.bias is not None and conv.bias.grad is not None
        exact = math.sqrt(float(conv.weight.grad.square().sum() + beta**2 * conv.bias.grad.square().sum()))
        for kind in EXACT_KINDS:
            assert float(norms[kind][i]) == pytest.approx(exact, rel=1e-5)
        assert exact <= float(norms[CapNorm.CHANNEL][i]) * (1 + 1e-6)
        assert float(norms[CapNorm.CHANNEL][i]) <= float(norms[CapNorm.FREE][i]) * (1 + 1e-6)


def test_a_cap_on_the_product_of_one_position_would_not_hold_for_a_convolution():
    """The mutant: ||x|| ||delta|| forgets that one input entry lies in several patches."""
    x, d = torch.ones(1, 1, 5, 5, dtype=torch.float64), torch.ones(1, 1, 5, 5, dtype=torch.float64)
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
    exact = float(conv_record_norm(x, d, geometry, 0.0, CapNorm.EXACT))
    assert exact > 2 * float(x.norm() * d.norm())
