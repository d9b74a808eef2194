"""All certified norms at once: never below the truth, close to it, and reused only while the weights stay."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from weightclip import models
from weightclip.bounds import gram_iteration, kernel_overlap, operator_norm_bound
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


def check_autocast(narrowed: str = "autocast") -> None:
    """Where products in float32 may be rounded to bfloat16, certified norms are not."""
    before = torch.get_float32_matmul_precision()
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(160, 160)
        with torch.no_grad():
            layer.weight.fill_(1 + 2.0**-9 if dtype == torch.float32 else 1 + 2.0**-7)  # bfloat16 rounds it down
        truth = _exact(layer)
        try:
            torch.set_float32_matmul_precision("medium" if narrowed == "setting" else "highest")
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrowed == "autocast"):
                bank = NormBank({"": layer})
                found = [bank.numbers(bank.weights(), dtype)[0], float(bank.vector(dtype))]
                found.append(float(gram_iteration(layer.weight, dtype=torch.float32)))
        finally:
            torch.set_float32_matmul_precision(before)
        assert all(truth <= value <= 1.03 * truth for value in found)


@pytest.mark.parametrize("narrowed", ["autocast", "setting"])
def test_norms_do_not_round_as_the_passes_do(narrowed: str) -> None:
    check_autocast(narrowed)


def test_norms_of_wide_layers_that_may_wait_for_the_device() -> None:
    """One by one, guessed and proved; where nothing is proved, as they are otherwise."""
    g = torch.Generator().manual_seed(0)
    close = torch.linalg.qr(torch.randn(70, 70, generator=g))[0] * (1 - 1e-6 * torch.arange(70))
    weights = [torch.randn(90, 200, generator=g), torch.randn(70, 70, generator=g) * 1e-20, torch.ones(30, 40), close,
               torch.zeros(20, 20)]  # fmt: skip
    for weight in weights:
        entries = [_bank._Part(0, *_bank._gram(weight), narrow=True)]
        truth = float(torch.linalg.matrix_norm(weight.double(), 2))
        for found in (_bank._largest_proved(128, entries), _bank._largest(128, entries, wait=True)):
            assert truth * (1 - 1e-14) <= float(found) <= 1.01 * truth
    for bad in (math.nan, math.inf):
        entries = [_bank._Part(0, *_bank._gram(torch.full((5, 5), bad)), narrow=True)]
        assert not math.isfinite(float(_bank._largest_proved(8, entries)))


def test_a_share_of_the_trace_covers_the_gram_matrix_of_a_proof() -> None:
    layer = torch.full((4, 20000), 1 / 3)  # every partial sum rounds the same way
    entries = [_bank._Part(0, *_bank._gram(layer), narrow=True)]
    assert float(_bank._largest_proved(4, entries)) >= float(torch.linalg.matrix_norm(layer.double(), 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_wide_layers_on_a_device() -> None:
    g = torch.Generator("cuda").manual_seed(0)
    net = nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 10)).cuda()
    for scale in (1.0, 1e-3, 30.0):
        with torch.no_grad():
            for layer in net:
                layer.weight.copy_(scale * torch.randn(layer.weight.shape, device="cuda", generator=g))
        bank = NormBank(_layers(net))
        for wait in (False, True):
            for layer, found in zip(net, bank.vector(wait=wait), strict=True):
                truth = float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2))
                assert truth * (1 - 1e-12) <= float(found) <= truth * 1.02
    with torch.no_grad():
        net[1].weight[5, 5] = math.nan
    assert not bool(torch.isfinite(NormBank(_layers(net)).vector(wait=True)[1]))
