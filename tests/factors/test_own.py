"""Gradients of single records on the CPU: equal to autograd's, their norms and sums those of the numbers themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from weightclip.factors import _own, make_layer_private
from weightclip.factors._record_norms import CHEAPEST, FREE, numbers

_LAYERS = {
    "conv": (lambda: nn.Conv2d(4, 6, 3, padding=1), (4, 7, 5)),
    "strided": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 3), padding=(1, 0), dilation=(2, 1)), (4, 9, 8)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 6, 6)),
    "no bias": (lambda: nn.Conv2d(2, 3, 3, bias=False), (2, 5, 5)),
    "line": (lambda: nn.Conv1d(3, 4, 3, padding=2), (3, 11)),
    "volume": (lambda: nn.Conv3d(2, 3, 2, padding=1), (2, 4, 3, 5)),
    "positions": (lambda: nn.Linear(5, 4), (6, 5)),
}


def _factors(layer: nn.Module, shape: tuple[int, ...], records: int = 5) -> tuple[Tensor, Tensor, list[int]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(records, *shape, generator=generator)
    d = torch.randn(layer(x).shape, generator=generator)
    if isinstance(layer, nn.Linear):
        return x, d, []
    zeros = (0,) * len(layer.kernel_size)
    return x, d, numbers(layer.stride, layer.padding, layer.dilation, layer.groups, False, zeros)


def _exact(layer: nn.Module, x: Tensor, d: Tensor) -> list[tuple[Tensor, ...]]:
    """Gradients of one record after the other, by autograd."""
    with torch.enable_grad():
        return [torch.autograd.grad(layer(x[i : i + 1]), list(layer.parameters()), d[i : i + 1]) for i in range(len(x))]


@pytest.mark.parametrize("long", [False, True], ids=["patches", "one by one"])
@pytest.mark.parametrize("name", _LAYERS)
def test_they_are_autograd_s_and_so_are_norms_and_sums(name: str, long: bool, monkeypatch: pytest.MonkeyPatch):
    make, shape = _LAYERS[name]
    torch.manual_seed(0)
    layer = make()
    x, d, conf = _factors(layer, shape)
    exact = _exact(layer, x, d)
    make_layer_private(layer, cap=1.0, beta=0.5)
    layer._wc_product = layer._wc_product.__class__(torch.float32, 1)  # what the engine chooses on the CPU
    if long:
        monkeypatch.setattr(_own, "_LONG", 0)
    else:
        monkeypatch.setattr(_own, "_ROOM", 2 * max(layer.weight.numel() * 5 // 2 + 1, 64))  # several chunks
    with torch.no_grad():
        own = layer._wc_form.own(layer, x, d, conf, CHEAPEST)
        assert own is not None and own.weight is not None
        norms = own.norm(0.5)
        scale = torch.tensor([0.3, 1.0, 0.0, 0.7, 0.2])
        weight, bias = own.sums(scale, layer.weight)
    assert weight is not None
    for i, (w, *b) in enumerate(exact):
        assert torch.allclose(own.weight[i], w.flatten(), atol=1e-5)
        true = (w.double().square().sum() + sum(0.25 * v.double().square().sum() for v in b)).sqrt()
        assert float(norms[i]) == pytest.approx(float(true), rel=1e-6)
    assert torch.allclose(weight, sum(s * g[0].double() for s, g in zip(scale, exact, strict=True)), atol=1e-5)
    assert (bias is None) == (len(exact[0]) == 1)
    if bias is not None:
        assert torch.allclose(bias, sum(s * g[1].double() for s, g in zip(scale, exact, strict=True)), atol=1e-5)


def test_a_norm_is_never_below_what_is_added():
    layer = nn.Conv2d(3, 8, 3)
    make_layer_private(layer, cap=1.0)
    layer._wc_product = layer._wc_product.__class__(torch.float32, 1)
    x, d, conf = torch.randn(64, 3, 6, 6), torch.randn(64, 8, 4, 4), numbers((1, 1), (0, 0), (1, 1), 1, False, (0, 0))
    with torch.no_grad():
        own = layer._wc_form.own(layer, x, d, conf, CHEAPEST)
        assert own is not None and own.weight is not None and own.bias is not None
        parts = torch.cat([own.weight.double(), own.bias], 1)
    assert (own.norm(1.0).double() >= parts.norm(dim=1)).all()


def test_a_record_that_is_not_finite_adds_exact_zeros():
    layer = nn.Conv2d(1, 2, 2)
    make_layer_private(layer, cap=1.0)
    layer._wc_product = layer._wc_product.__class__(torch.float32, 1)
    x, d = torch.randn(3, 1, 3, 3), torch.randn(3, 2, 2, 2)
    x[1, 0, 0, 0] = float("inf")
    with torch.no_grad():
        own = layer._wc_form.own(layer, x, d, numbers((1, 1), (0, 0), (1, 1), 1, False, (0, 0)), CHEAPEST)
        assert own is not None
        assert not torch.isfinite(own.norm(1.0))[1]
        weight, bias = own.sums(torch.tensor([1.0, 0.0, 1.0]), layer.weight)
    assert weight is not None and bias is not None and torch.isfinite(weight).all() and torch.isfinite(bias).all()


def test_other_ways_and_sizes_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    layer = nn.Conv2d(1, 2, 2)
    make_layer_private(layer, cap=1.0)
    layer._wc_product = layer._wc_product.__class__(torch.float32, 1)
    x, d, conf = torch.randn(3, 1, 3, 3), torch.randn(3, 2, 2, 2), numbers((1, 1), (0, 0), (1, 1), 1, False, (0, 0))
    with torch.no_grad():
        assert layer._wc_form.own(layer, x, d, conf, FREE) is None
        assert layer._wc_form.own(layer, x.double(), d.double(), conf, CHEAPEST) is None
        monkeypatch.setattr(_own, "_ROOM", 3 * 8 - 1)
        assert layer._wc_form.own(layer, x, d, conf, CHEAPEST) is None
