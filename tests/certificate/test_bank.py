"""All certified norms at once: never below the truth, close to it, and reused only while the weights stay."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from weightclip import models
from weightclip.bounds import kernel_overlap, operator_norm_bound
from weightclip.certificate import _bank
from weightclip.certificate._bank import NormBank


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    return {k: m for k, m in model.named_modules() if isinstance(m, (nn.Linear, _ConvNd))}


def _exact(module: nn.Module) -> float:
    weight = module.weight.detach().double()
    if not isinstance(module, _ConvNd):
        return float(torch.linalg.matrix_norm(weight, 2))
    groups = weight.reshape(module.groups, weight.shape[0] // module.groups, -1)
    if not isinstance(module, _ConvTransposeNd):
        groups = weight.reshape(module.groups, -1, weight[0].numel())
    return math.sqrt(kernel_overlap(module)) * max(float(torch.linalg.matrix_norm(g, 2)) for g in groups)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 300), nn.Linear(300, 300), nn.Linear(300, 1)),
        nn.Sequential(nn.Conv2d(4, 8, 3, groups=2, stride=2), nn.ConvTranspose2d(8, 4, 3), nn.Conv1d(3, 6, 5)),
        models.ConvNet(),
        models.WideResNet(16, 1),
    ],
    ids=["dense", "grouped", "convnet", "wrn"],
)
@pytest.mark.parametrize("large", [1 << 21, 1])  # 1: every Gram matrix goes through float32 blocks
def test_norms_are_upper_bounds_and_tight(model: nn.Module, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bank, "_LARGE", large)
    layers = _layers(model)
    for path, norm in zip(layers, NormBank(layers).vector(), strict=True):
        truth = _exact(layers[path])
        assert truth <= float(norm) <= 1.02 * truth


def test_an_adversarial_matrix_for_float32_blocks() -> None:
    """Rank one, all entries equal: every partial sum rounds the same way."""
    layer = nn.Linear(20000, 4, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1 / 3)
    norm = float(NormBank({"": layer}).vector())
    assert norm >= float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2))


def test_weights_as_cast() -> None:
    layer = nn.Linear(64, 64)
    cast = float(torch.linalg.matrix_norm(layer.weight.detach().bfloat16().double(), 2))
    assert float(NormBank({"": layer}).vector(torch.bfloat16)) >= cast


def test_never_below_the_public_bound_divided_by_its_slack() -> None:
    """The bank only knows sqrt(m)||R||, so it may be looser than operator_norm_bound, never tighter than the truth."""
    layers = _layers(models.ConvNet())
    for path, norm in zip(layers, NormBank(layers).vector(), strict=True):
        assert float(norm) >= operator_norm_bound(layers[path]) * (1 - 1e-9)


def test_nan_weights_give_nan() -> None:
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight[0, 0] = math.nan
    assert math.isnan(float(NormBank({"": layer}).vector()))
