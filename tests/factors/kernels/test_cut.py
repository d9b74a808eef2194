"""TF32 operands of tiles against norms of the numbers themselves: rows of a record, and several uses of one layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.triton_kit import kernel_device, run_interpreted
from torch import Tensor, nn

from weightclip.factors import Product, _collector, _conv, _limits, make_layer_private
from weightclip.factors._collector import Use
from weightclip.factors._joint import norm_over
from weightclip.factors._record_norms import numbers

UNCUT = 1 + 2.0**-10 - 2.0**-23  # TF32 cuts it to 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    found = kernel_device()
    as_on_a_gpu(monkeypatch)
    return found


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways that tensors of a GPU go where convolutions may use TF32, as torch allows unless told otherwise."""
    for module in (_conv, _limits):
        monkeypatch.setattr(module, "of_one_record", lambda product, x: (torch.float64, 0))
    for module in (_conv, _collector):
        monkeypatch.setattr(module, "fits_tiles", lambda x, d, *args, **options: x.dtype == torch.float32)


def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def made(layer: nn.Module, device: torch.device) -> Any:
    make_layer_private(layer.to(device), cap=1.0, product=Product(torch.float32, 1))
    return layer


def cancelling(records: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs of one, cotangents that cancel until they are cut."""
    x, d = torch.ones(records, 3, 4, 4), torch.full((records, 5, 4, 4), UNCUT)
    d[..., 2:] = -(1 + 2.0**-10)
    return x.to(device), d.to(device)


CONF = numbers((1, 1), (0, 0), (1, 1), 1, False, (0, 0))


@torch.no_grad()
def test_rows_of_a_one_dimensional_convolution_are_measured_as_they_are_formed(device):
    """They are an axis of the norm, but not of the sum, which no tile forms."""
    layer = made(nn.Conv1d(3, 5, 1, bias=False), device)
    x, d = (torch.full((8, n, 8), UNCUT, device=device) for n in (3, 5))
    use = Use(None, layer, x, d, numbers((1,), (0,), (1,), 1, False, (0,)), 4)
    added = use.scaled(torch.tensor([1.0, 0.0], device=device))[0]
    x, d, conf = use.grouped()
    norm, scale = _conv.CONV.norm(layer, x, d, layer._wc_kind, conf), _conv.CONV.scale(layer, x, d, None, conf)
    assert added is not None and scale is not None and float(norm[0]) >= float(added.norm())
    assert float(scale[0]) * float(added.norm()) <= 1 + 1e-6


def test_rows_of_a_convolution_are_formed_as_they_are_measured(device):
    rows_that_cancel(device)


@torch.no_grad()
def rows_that_cancel(device: torch.device) -> None:
    layer = made(nn.Conv2d(3, 5, 1, bias=False), device)
    use = Use(None, layer, *cancelling(4, device), CONF, 4)
    added, (x, d, conf) = use.scaled(torch.ones(1, device=device))[0], use.grouped()
    norm = _conv.CONV.norm(layer, x, d, layer._wc_kind, conf)
    assert added is not None and float(norm) >= float(added.double().norm())


def test_several_uses_are_measured_as_they_are_formed(device):
    uses_that_cancel(device)


@torch.no_grad()
def uses_that_cancel(device: torch.device) -> None:
    layer = made(nn.Conv2d(3, 5, 1, bias=False), device)
    uses = [Use(None, layer, *cancelling(1, device), CONF) for _ in range(2)]
    added = [use.scaled(torch.ones(1, device=device), True)[0] for use in uses]
    norm = norm_over(uses, layer._wc_kind)
    assert added[0] is not None and added[1] is not None
    assert float(norm) >= float((added[0] + added[1]).norm())
