"""Weight standardisation in the engine: bounds at the effective kernel, noise there, pull-back after the noise."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.bounds import operator_norm_bound
from weightclip.nn import StandardizedConv2d


def small_net(scale: float = 1.0, floor: float = 1e-3, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        StandardizedConv2d(2, 4, 3, padding=1, bias=bias, floor=floor), nn.ReLU(),
        StandardizedConv2d(4, 3, 3, stride=2, bias=bias, floor=floor), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip
    with torch.no_grad():
        for module in net:
            if isinstance(module, StandardizedConv2d):
                module.weight.mul_(scale)
    return net


def plain_twin(net: nn.Sequential) -> nn.Sequential:
    """The same function as an ordinary network with the effective kernels: its gradients are exact dL/dW-hat."""
    layers: list[nn.Module] = []
    for module in net:
        if isinstance(module, StandardizedConv2d):
            twin = nn.Conv2d(
                module.in_channels, module.out_channels, 3, module.stride, module.padding, bias=module.bias is not None
            )
            twin.weight.data.copy_(module.effective_weight().detach())
            if module.bias is not None and twin.bias is not None:
                twin.bias.data.copy_(module.bias.detach())
            layers.append(twin)
        else:
            layers.append(copy.deepcopy(module))
    return nn.Sequential(*layers)


def record_gradients(net: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    found = []
    for i in range(len(x)):
        net.zero_grad()
        F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]).backward()
        found.append({k: p.grad.detach().clone() for k, p in net.named_parameters() if p.grad is not None})
    return found


def private(net: nn.Module, x: Tensor, y: Tensor, sigma: float, bounds: wc.Bounds, batch: int | None = None):
    engine = wc.PrivacyEngine()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(x, y), batch_size=batch or len(x))
    parts = engine.make_private(
        module=net, optimizer=optimizer, data_loader=loader, criterion=nn.CrossEntropyLoss(), noise_multiplier=sigma,
        bounds=bounds, generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    return engine, *parts


def one_step(net: nn.Module, optimizer, loader, loss) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
        return


def project(x: Tensor, radius: float) -> Tensor:
    return x * (radius / x.flatten(1).norm(dim=1)).clamp(max=1).view(-1, 1, 1, 1)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
@pytest.mark.parametrize("bias", [True, False])
def test_certificate_bounds_the_gradient_at_the_effective_kernel(scale, bias):
    net = small_net(scale, bias=bias)
    x = project(torch.randn(24, 2, 6, 6) * 10, 2.0)
    x[0], x[1] = 0.0, 2.0 / math.sqrt(72)  # the constant record of full norm drives a kernel of one sign
    y = torch.randint(0, 3, (24,))
    certificate = wc.certify(net, nn.CrossEntropyLoss(), 2.0, x[:1])
    for gradients in record_gradients(plain_twin(net), x, y):
        for name, bound in certificate.sensitivities.items():
            square = sum(float(g.square().sum()) for k, g in gradients.items() if k.startswith(f"{name}."))
            assert math.sqrt(square) <= bound * (1 + 1e-6)


def test_clipping_the_parameter_says_nothing_about_the_effective_kernel():
    """The mutant: a gain taken from W, which weight clipping keeps small, would be far below the truth."""
    net = small_net(1e-2)
    conv = net[0]
    assert isinstance(conv, StandardizedConv2d)
    plain = nn.Conv2d(2, 4, 3, padding=1)
    plain.weight.data.copy_(conv.weight.detach())
    believed = operator_norm_bound(plain, input_size=6)
    x = torch.randn(64, 2, 6, 6)
    with torch.no_grad():
        moved = (conv(x) - conv(torch.zeros_like(x))).flatten(1).norm(dim=1)
    reached = float((moved / x.flatten(1).norm(dim=1)).max())
    certificate = wc.certify(net, nn.CrossEntropyLoss(), 1.0, x[:1], bounds=wc.Bounds(weight_norm=0.1))
    assert believed < 0.5 * reached <= reached <= certificate.rows[0].gain


def test_engine_gradient_is_the_ordinary_one_without_noise_or_limits():
    net, x, y = small_net(), torch.randn(8, 2, 6, 6), torch.randint(0, 3, (8,))
    plain = copy.deepcopy(net)
    F.cross_entropy(plain(x), y).backward()
    engine, net, optimizer, loader, loss = private(net, x, y, 0.0, wc.Bounds(input_radius=1e6))
    one_step(net, optimizer, loader, loss)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert type(engine.detach()[0]) is StandardizedConv2d


@pytest.mark.parametrize("joint", [False, True])
def test_noise_is_added_before_the_pull_back(joint):
    """Pure noise pulled back lies in the Jacobian's range: centred per channel, orthogonal to the centred kernel."""
    x, y = torch.zeros(4, 2, 6, 6), torch.zeros(4, dtype=torch.long)
    bounds = wc.Bounds(joint_cap=1.0) if joint else wc.Bounds(layer_radius=1.0, cotangent_radius=1.0)
    _, net, optimizer, loader, loss = private(small_net(), x, y, 2.0, bounds)
    one_step(net, optimizer, loader, loss)
    for module in net.children():
        if isinstance(module, StandardizedConv2d):
            assert module.weight.grad is not None
            grad, weight = module.weight.grad.double().flatten(1), module.weight.detach().double().flatten(1)
            centred = weight - weight.mean(1, keepdim=True)
            size = grad.norm(dim=1)
            assert (grad.mean(1).abs() < 1e-5 * size).all()
            assert ((grad * centred).sum(1).abs() < 1e-5 * size * centred.norm(dim=1)).all()


def test_noise_after_the_pull_back_would_be_too_small():
    """The mutant: one record moves the pulled-back sum by far more than Delta."""
    net = small_net(1e-3)
    x, y = project(torch.randn(16, 2, 6, 6), 1.0), torch.randint(0, 3, (16,))
    delta = wc.certify(net, nn.CrossEntropyLoss(), 1.0, x[:1]).sensitivities["2"]
    norms = [float(g["2.weight"].norm()) for g in record_gradients(net, x, y)]
    assert max(norms) > 3 * delta


@pytest.mark.parametrize("bounds", [
    wc.Bounds(layer_radius=0.5, cotangent_radius=0.2), wc.Bounds(joint_cap=0.1), wc.Bounds(layer_cap=0.1),
])  # fmt: skip
def test_black_box_one_record_moves_the_sum_by_at_most_delta(bounds):
    """The released sum before the pull-back, seen by taking the pull-back off the release."""
    x, y = torch.randn(6, 2, 6, 6) * 5, torch.randint(0, 3, (6,))

    def released(mask_last: bool) -> tuple[wc.PrivacyEngine, list[Tensor]]:
        net = small_net()
        keep = x[:5] if mask_last else x
        labels = y[:5] if mask_last else y
        engine = wc.PrivacyEngine()
        net, optimizer, loader, loss = engine.make_private(
            module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
            data_loader=DataLoader(TensorDataset(keep, labels), batch_size=len(keep)), criterion=nn.CrossEntropyLoss(),
            noise_multiplier=0.0, bounds=bounds, expected_batch_size=6,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        release = engine.training.release
        release.blocks[:] = [dataclasses.replace(block, pull_back=None) for block in release.blocks]
        one_step(net, optimizer, loader, loss)
        return engine, [p.grad * 6 for p in net.parameters() if p.grad is not None]

    engine, with_it = released(False)
    _, without = released(True)
    names = [k.rsplit(".", 1)[0] for k, _ in engine.model.named_parameters()]  # type: ignore[union-attr]
    for name, bound in engine.certificate().sensitivities.items():
        square = sum(
            float((a - b).square().sum()) for n, a, b in zip(names, with_it, without, strict=True) if n == name
        )
        assert math.sqrt(square) <= bound


def test_wide_resnet_with_weight_standardisation_trains():
    torch.manual_seed(0)
    net = wc.models.WideResNet(10, 1, num_classes=3, weight_standardization=True, bias=False, groups=4)
    x, y = torch.randn(12, 3, 8, 8), torch.randint(0, 3, (12,))
    before = [p.detach().clone() for p in net.parameters()]
    engine = wc.PrivacyEngine()
    net, optimizer, loader, loss = engine.make_private(
        module=net, optimizer=torch.optim.Adam(net.parameters(), lr=1e-2),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=6), criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0, bounds=wc.Bounds(layer_radius=1.0, cotangent_radius=0.1, weight_norm=1.0, refresh=2),
    )  # fmt: skip
    for a, b in loader:
        optimizer.zero_grad()
        loss(net(a), b).backward()
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in net.parameters())
    assert all(not torch.equal(a, p) for a, p in zip(before, net.parameters(), strict=True))
    for row in engine.certificate().rows:
        module = net.get_submodule(row.name)
        if isinstance(module, StandardizedConv2d):
            effective = module.effective_weight().detach()
            assert row.gain >= float(torch.linalg.matrix_norm(effective.flatten(1), 2)) * 0.999
