"""Row kernels, run by Triton's interpreter where there is no GPU (skipped without Triton)."""

from __future__ import annotations

import math

import pytest
import torch
from tests.triton_kit import kernel_device, run_interpreted

import weightclip as wc
from weightclip.engine._entrance import _project_widely
from weightclip.factors.kernels._one_launch import cross_entropy, fits, fits_classes, project, scale_blocks_
from weightclip.losses import CrossEntropy

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy, at NaN and infinity


@pytest.fixture
def device() -> torch.device:
    return kernel_device()


def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize("shape", [(5, 3), (4, 105), (3, 2, 17, 31)])
@pytest.mark.parametrize("radius", [1.0, 1e-6, 3e38, math.inf])
def test_records_are_projected(shape, radius, device) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).flatten(1)
    x[0], x[1], x[2, 1] = 0.0, x[1] * (1e38 / x[1].abs().max()), math.nan
    x = x.reshape(shape).to(device)
    found, expected = project(x, radius), _project_widely(x, radius, tuple(range(1, x.dim())))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    norms = found.flatten(1).double().norm(dim=1)
    assert bool((norms <= radius * (1 + (found[0].numel() + 8) * 2.0**-24)).all()) and not found[2].any()


@pytest.mark.parametrize("sizes", [[7], [1, 1, 3000, 5], [1024, 1, 1023, 0, 2], [3] * 100])
def test_blocks_are_scaled(sizes, device) -> None:
    values = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0)).to(device)
    factors = torch.rand(len(sizes), generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    expected = [part * factor.float() for part, factor in zip(values.split(sizes), factors, strict=True)]
    scale_blocks_(values, factors, torch.tensor(sizes).cumsum(0).to(device))
    assert torch.equal(values, torch.cat(expected))


@pytest.mark.parametrize("classes", [2, 10, 100, 1000])
@pytest.mark.parametrize("loss", [CrossEntropy(), CrossEntropy(temperature=0.3, scale_by_temperature=True),
                                  CrossEntropy(ignore_index=1)])  # fmt: skip
def test_cross_entropy_is_the_one_of_the_operators(classes, loss, device) -> None:
    g = torch.Generator().manual_seed(classes)
    z, y = 20 * torch.randn(40, classes, generator=g), torch.randint(0, classes, (40,), generator=g)
    z[0], z[1, 0], z[2, 1] = 0.0, math.nan, -math.inf
    z[3], z[3, 0] = -3e38, 3e38
    y[4], y[5], y[6] = classes, -1, -100
    expected = loss.both(z, y)
    factor = loss._outer() / loss.temperature * (1 - 8 * torch.finfo(torch.float32).eps)
    z, y = z.to(device), y.to(device)
    found = cross_entropy(z, y, loss.ignore_index, loss.temperature, loss._outer(), factor)
    finite = torch.arange(40) != 3  # there the operators' own difference overflows
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu()[finite], b[finite], rtol=2e-5, atol=2e-6)
    bad = [1, 2, 4, 5] if loss.ignore_index == 1 else [1, 2, 4, 5, 6]
    assert not found[1].cpu()[bad].any() and not found[0].cpu()[bad].any()
    assert float(found[1].double().norm(dim=1).max()) <= loss.bound((classes,))
    alone = cross_entropy(z[7:8], y[7:8], loss.ignore_index, loss.temperature, loss._outer(), factor)
    assert torch.equal(alone[1][0], found[1][7]) and torch.equal(alone[0][0], found[0][7])


def test_what_fits() -> None:
    assert not fits(torch.ones(2, 3)) and not fits_classes(torch.ones(2, 3), torch.ones(2, dtype=torch.long))
    if torch.cuda.is_available():
        x, y = torch.ones(2, 3).cuda(), torch.zeros(2, dtype=torch.long).cuda()
        assert fits(x) and fits_classes(x, y) and not fits(x.t()) and not fits(x.double()) and not fits(x[:0])
        assert not fits(x.requires_grad_()) and not fits_classes(x.detach(), y.int())


def test_errors_are_those_of_the_operators() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with pytest.raises(wc.ContractError, match="labels of shape"):
        CrossEntropy().both(torch.zeros(3, 4).cuda(), torch.zeros(2, dtype=torch.long).cuda())
