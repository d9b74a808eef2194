"""The CUDA kernel of weight gradients, run by Triton's interpreter where there is no GPU (skipped without Triton)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.triton_kit import kernel_device, run_interpreted
from torch import Tensor

from weightclip.factors._affine import affine_factors, affine_record_norm
from weightclip.factors._conv import _by_products, patch_norm_squared, patch_weights
from weightclip.factors._limits import record_scale, squared_norm
from weightclip.factors._record_norms import Shape
from weightclip.factors.kernels import _products as _kernel
from weightclip.factors.kernels import _tiles
from weightclip.factors.kernels._products import (
    channel_scale,
    dense_gradient,
    fits,
    fused_norms,
    fused_scale,
    record_sums,
    tile_bias,
    weight_gradient,
)

CASES = [  # records, in, out, size, stride, padding, dilation, kernel
    (3, 5, 7, (9, 6), (1, 1), (1, 1), (1, 1), (3, 3)),
    (4, 3, 20, (8, 8), (2, 1), (1, 0), (1, 1), (3, 2)),
    (2, 4, 4, (10, 11), (1, 1), (2, 1), (2, 1), (3, 3)),
    (5, 1, 3, (5, 5), (2, 2), (0, 0), (1, 1), (1, 1)),
    (1, 17, 2, (4, 4), (1, 1), (0, 0), (1, 1), (2, 2)),
    (2, 17, 66, (3, 4), (1, 1), (0, 0), (1, 1), (2, 2)),  # two tiles along both sides
]


def factors(case, last: bool):
    """Inputs, weights and cotangents of a case, and the generator they came from."""
    records, channels, out, size, stride, padding, dilation, kernel = case
    form = torch.channels_last if last else torch.contiguous_format
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(records, channels, *size, generator=generator).contiguous(memory_format=form)
    weight = torch.randn(out, channels, *kernel, generator=generator)
    d = torch.randn(F.conv2d(x, weight, None, stride, padding, dilation).shape, generator=generator)
    return x, weight, d.contiguous(memory_format=form), generator


@pytest.fixture
def interpreter() -> torch.device:
    return kernel_device()


def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_it_is_the_scaled_gradient_in_float64(case, last, scaled, together, interpreter, monkeypatch):
    monkeypatch.setattr(_kernel, "_TOGETHER", 1 << 30 if together else 0)
    records, *_, stride, padding, dilation, kernel = case
    x, weight, d, generator = factors(case, last)
    scale = torch.rand(records, generator=generator) if scaled else None
    weighted = d if scale is None else d * scale.view(-1, 1, 1, 1)
    expected = torch.ops.aten.convolution_backward(
        weighted.double(), x.double(), weight.double(), None, stride, padding, dilation, False, (0, 0), 1,
        (False, True, False),
    )[1]  # fmt: skip
    x, d, scale = (None if t is None else t.to(interpreter) for t in (x, d, scale))
    assert x is not None and d is not None
    found, sums = weight_gradient(x, d, scale, kernel, stride, padding, dilation, bias=True)
    torch.testing.assert_close(sums.cpu(), weighted.double().sum((0, 2, 3)), rtol=1e-12, atol=1e-12)
    alone, none = weight_gradient(x, d, scale, kernel, stride, padding, dilation)
    assert none is None and torch.equal(alone, found)
    assert found.dtype == torch.float64 and found.shape == weight.shape
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("last", [False, True])
def test_records_with_scale_zero_add_exact_zeros(last, interpreter):
    form = torch.channels_last if last else torch.contiguous_format
    x, d = torch.randn(3, 4, 5, 5, device=interpreter), torch.randn(3, 6, 3, 3, device=interpreter)
    x, d = (t.contiguous(memory_format=form) for t in (x, d))
    x[1], d[1] = float("nan"), float("inf")
    scale = torch.tensor([0.5, 0.0, 1.0], device=interpreter)
    found = weight_gradient(x, d, scale, (3, 3), (1, 1), (0, 0), (1, 1), bias=True)
    others = weight_gradient(x[[0, 2]], d[[0, 2]], scale[[0, 2]], (3, 3), (1, 1), (0, 0), (1, 1), bias=True)
    torch.testing.assert_close(found, others, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("places", [(), (7,), (2, 3)])
def test_dense_layers_with_positions(places, interpreter):
    x, d = torch.randn(5, *places, 12, device=interpreter), torch.randn(5, *places, 3, device=interpreter)
    scale = torch.rand(5, device=interpreter)
    weighted = d * scale.view(-1, *(1,) * (d.dim() - 1))
    expected = torch.einsum("...o,...i->oi", weighted.double(), x.double())
    found, sums = dense_gradient(x, d, scale, bias=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums, weighted.double().flatten(0, -2).sum(0), rtol=1e-12, atol=1e-12)


def strided_scales(module: Any, way: str, device: torch.device) -> None:
    """Every second number of a longer tensor is the scale of a record: the numbers between them are nobody's."""
    generator = torch.Generator().manual_seed(0)
    x, d = (torch.randn(6, n, 5, 5, generator=generator).to(device) for n in (4, 3))
    scale = torch.rand(12, generator=generator).to(device)[::2]
    flat, last = d.flatten(2), d.flatten(2).transpose(1, 2).contiguous().transpose(1, 2)
    window = ((1, 1), (1, 1), (0, 0), (1, 1))
    works: dict[str, Callable[[Tensor], Tensor]] = {
        "weight_gradient": lambda s: module.weight_gradient(x, d, s, *window)[0],
        "sums": lambda s: module.record_sums(flat, s),
        "sums by records": lambda s: module.record_sums(last, s),
        "over_records": lambda s: module.over_records(flat.transpose(1, 2), s),
        "tile_sums": lambda s: module.tile_sums(x, d, s, module.Window((1, 1))),
    }
    assert torch.equal(works[way](scale), works[way](scale.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize("way", ["weight_gradient", "sums", "sums by records", "over_records", "tile_sums"])
def test_scales_may_lie_apart(way, interpreter):
    strided_scales(_tiles if way == "tile_sums" else _kernel, way, interpreter)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("shape", [(5, 3, 7), (2, 70, 4), (9, 1, 1), (3, 16, 40, 30), (70, 3, 16)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_sums_over_records_and_positions(shape, last, scaled, interpreter):
    generator = torch.Generator().manual_seed(0)
    x, d = (torch.randn(shape, generator=generator).flatten(2) for _ in range(2))
    if last:
        x, d = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, d))
    scale = torch.rand(shape[0], generator=generator) if scaled else None
    weight = torch.ones(shape[0]) if scale is None else scale
    if scale is not None:
        x[0], d[1], scale[0], scale[1] = float("nan"), float("inf"), 0.0, 0.0
    keep = weight > 0
    weighted = (weight[keep, None, None] * d[keep]).double()
    plain, product = weighted.sum((0, 2)), (weighted * x[keep].double()).sum((0, 2))
    x, d, scale = (None if t is None else t.to(interpreter) for t in (x, d, scale))
    assert d is not None
    torch.testing.assert_close(record_sums(d, scale)[0].cpu(), plain, rtol=1e-12, atol=1e-12)
    found = record_sums(d, scale, x)
    torch.testing.assert_close(found.cpu(), torch.stack([plain, product]), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("shape", [(5, 17, 3), (3, 130, 140)])
def test_a_bias_beside_tiles_adds_what_each_record_adds_alone(shape, interpreter):
    bias_of_records(interpreter, shape)


def bias_of_records(device: torch.device, shape: tuple[int, int, int] = (3, 130, 140)) -> None:
    generator = torch.Generator().manual_seed(0)
    d = torch.randn(shape, generator=generator).bfloat16().to(device)
    scale = torch.rand(shape[0], generator=generator).to(device)
    d[1], scale[1] = float("nan"), 0.0
    found = tile_bias(d, scale)
    alone = sum(tile_bias(d[i : i + 1], scale[i : i + 1]) for i in range(shape[0]))
    torch.testing.assert_close(found, alone, rtol=1e-14, atol=1e-14)
    keep = scale > 0
    exact = (scale[keep, None, None].double() * d[keep].double()).sum((0, 1))
    room = (
        (shape[1] + 8) * 2.0**-22 * math.sqrt(shape[1]) * (scale[keep] * d[keep].float().flatten(1).norm(dim=1)).sum()
    )
    assert float((found - exact).norm()) <= float(room)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, about the overflow that is meant to happen
@pytest.mark.parametrize("flags", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("last", [False, True])
def test_fused_scales_are_those_of_the_norms(flags, last, interpreter):
    form = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(9, 4, 8, 7, device=interpreter).contiguous(memory_format=form)
    d = torch.randn(9, 3, 4, 5, device=interpreter).contiguous(memory_format=form)
    x[1], d[2], x[3, 0, 0, 0], x[4], d[5] = 0.0, 0.0, float("nan"), 1e30, float("inf")
    x[6], d[6] = 1e-3, 1e-3  # within every limit
    conf = ((3, 3), (2, 1), (1, 1), (1, 0))  # kernel, stride, dilation, padding
    limits, bias = torch.tensor([2.0, 1.5, 1.2], device=interpreter), 0.04 * 20
    x_norm = (patch_norm_squared(x, (4, 5), *conf) + bias).sqrt()
    expected = record_scale(x_norm, squared_norm(d).sqrt(), limits, flags)
    assert expected is not None
    found = fused_scale(x, d, limits, flags, bias, patch_weights(x, (4, 5), *conf))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)
    assert found[6] == 1 and 0 < found[0] < 1 and found[3] == found[4] == found[5] == 0
    dense = record_scale((squared_norm(x) + bias).sqrt(), squared_norm(d).sqrt(), limits, flags)
    torch.testing.assert_close(fused_scale(x, d, limits, flags, bias), dense, rtol=1e-5, atol=0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("last", [False, True])
def test_fused_norms_are_those_of_the_factors(last, interpreter):
    form = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(6, 4, 8, 7, device=interpreter).contiguous(memory_format=form)
    d = torch.randn(6, 3, 4, 5, device=interpreter).contiguous(memory_format=form)
    x[1], d[2], x[3, 0, 0, 0], x[4], d[5] = 0.0, 0.0, float("nan"), 1e30, float("inf")
    conf, bias = ((3, 3), (2, 1), (1, 1), (1, 0)), 0.04 * 20
    expected = (patch_norm_squared(x, (4, 5), *conf) + bias).sqrt() * squared_norm(d).sqrt()
    found = fused_norms(x, d, bias, patch_weights(x, (4, 5), *conf))
    torch.testing.assert_close(found[:3], expected[:3], rtol=1e-5, atol=0.0)
    assert not torch.isfinite(found[3:]).any() and not torch.isnan(found).any()
    dense = (squared_norm(x[:3]) + bias).sqrt() * squared_norm(d[:3]).sqrt()
    torch.testing.assert_close(fused_norms(x[:3], d[:3], bias), dense, rtol=1e-5, atol=0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fused_scales_below_the_normal_numbers_are_zero(interpreter):
    x, d = torch.full((3, 2), 1e19, device=interpreter), torch.full((3, 2), 1e18, device=interpreter)
    d[0], d[1] = 1e-3, 1e15
    limits = torch.tensor([1.0, 1.0, 1e-3], device=interpreter)
    found, cap = fused_scale(x, d, limits, 4, 0.0), limits[2].double()
    product = x.double().norm(dim=1) * d.double().norm(dim=1)
    assert found[0] > 0 and found[1] > 0 and found[2] == 0 and bool((found * product <= cap * (1 + 1e-5)).all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("size", [5, 20_000])
def test_what_squares_hide_is_limited(size, interpreter):
    """Squares of tiny numbers vanish in float32: what they may hide is part of a norm, for one program and for many."""
    tiny, large = (torch.full((3, size), value, device=interpreter) for value in (1e-23, 1e16))
    limits = torch.tensor([1.0, 1.0, 1e-8], device=interpreter)
    for x, d in ((tiny, large), (large, tiny)):
        found = fused_scale(x, d, limits, 4, 0.0)
        product = x.double().norm(dim=1) * d.double().norm(dim=1)
        assert bool((found > 0).all()) and bool((found * product <= 1e-8).all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_squares_of_channels_hide_is_limited(interpreter):
    """Sums are float64 there, but norms below float32's numbers still count as the norms of the operators do."""
    tiny, large = (torch.full((3, 4, 5), value, device=interpreter) for value in (1e-23, 1e16))
    limits = torch.tensor([1.0, 1.0, 1e-8], device=interpreter)
    for x, d in ((tiny, large), (large, tiny)):
        expected = record_scale(*affine_factors(x, d, 0.0, [2]), limits, 4)
        torch.testing.assert_close(channel_scale(x, d, limits, 4, 0.0), expected, rtol=1e-5, atol=0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("shape", [(8, 5, 9), (8, 70, 3), (8, 4, 1), (8, 70, 20)])
@pytest.mark.parametrize("last", [False, True])
def test_scales_and_norms_of_a_gain_and_an_offset_per_channel(shape, last, interpreter):
    generator = torch.Generator().manual_seed(0)
    x, d = (torch.randn(shape, generator=generator).to(interpreter) for _ in range(2))
    x[1], d[2], x[3, 0, 0], d[5, 1, 0] = 0.0, 0.0, float("nan"), float("inf")
    x[6], d[6], x[7, -1] = 1e-3, 1e-3, 5.0  # within every limit; a last channel that is the largest
    if last:
        x, d = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, d))
    limits, finite = torch.tensor([2.0, 1.5, 1.2], device=interpreter), [0, 1, 2, 4, 6, 7]
    for flags in (1, 2, 4, 7):
        expected = record_scale(*affine_factors(x, d, 0.3, [2]), limits, flags)
        found = channel_scale(x, d, limits, flags, 0.3)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)
        assert found[3] == 0 == found[5]
    expected = affine_record_norm(x, d, [2], 0.3)
    found = channel_scale(x, d, None, 0, 0.3, 1e-9)
    torch.testing.assert_close(found[finite], expected[finite], rtol=1e-5, atol=1e-6)
    assert torch.isinf(found[[3, 5]]).all()
    xs, ds = x[finite].double(), d[finite].double()
    exact = ((xs * ds).sum(2).square().sum(1) + 0.3**2 * ds.sum(2).square().sum(1)).sqrt()
    never_less = channel_scale(x, d, None, 0, 0.3)[finite].double()
    assert bool((never_less >= exact).all()) and bool((never_less <= exact * (1 + 2.0**-20)).all())
    exact += 0.5 * ((xs * ds).abs().sum((1, 2)) + 0.3 * ds.abs().sum((1, 2)))
    torch.testing.assert_close(channel_scale(x, d, None, 0, 0.3, 0.5)[finite].double(), exact, rtol=1e-5, atol=0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_scales_of_few_large_records(interpreter):
    """Few programs read more at once: the same scales."""
    x, d = torch.randn(3, 40, 500, device=interpreter), torch.randn(3, 40, 300, device=interpreter)
    x[2, 39, 499] = float("inf")
    x[1] *= 2.0
    limits = torch.tensor([20.0, 15.0, 1.2], device=interpreter)
    for flags in (1, 2, 4, 7):
        expected = record_scale((squared_norm(x) + 5e3).sqrt(), squared_norm(d).sqrt(), limits, flags)
        torch.testing.assert_close(fused_scale(x, d, limits, flags, 5e3), expected, rtol=1e-5, atol=0.0)


def test_records_that_reach_far_in_memory_do_not_fit(monkeypatch):
    """Places within a record are int32 in the kernels: what counts is how far they lie apart, not how many they are."""
    monkeypatch.setattr("weightclip.factors.kernels._products.triton_found", lambda: True)
    near = torch.empty(4, 3, 8, 8, device="meta")
    far = torch.empty_strided((4, 3, 8, 8), (64, 2**30 + 1, 8, 1), device="meta")

    class Cuda(torch.Tensor):
        is_cuda = True

    near, far = near.as_subclass(Cuda), far.as_subclass(Cuda)
    assert fits(near, near) and not fits(far, near) and not fits(near, far)
    last = torch.empty(2**15, 1, 2**8, 2**8 - 1, device="meta").as_subclass(Cuda)  # the step behind its end is too far
    assert last.numel() < 2**31 and not fits(last, last)


def test_other_devices_and_types_do_not_fit():
    x = torch.zeros(2, 3, 4, 4)
    assert not fits(x, x)
    assert not fits(x.to("meta").double(), x.to("meta").double())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_norms_of_records_are_those_of_their_float64_gradients(case, last, beta, interpreter, monkeypatch):
    monkeypatch.setattr(_kernel, "_MOST", 2)
    norms_of_gradients(interpreter, case, last, beta)


def norms_of_gradients(device, case=CASES[0], last=False, beta=0.7) -> None:
    *_, stride, padding, dilation, kernel = case
    x, _, d, _ = factors(case, last)
    u = F.unfold(x.double(), kernel, dilation, padding, stride)
    exact = (u @ d.double().flatten(2).mT).square().sum((1, 2))
    x, d = x.to(device), d.to(device)
    found = _kernel.gradient_squares(x, d, kernel, stride, padding, dilation)
    torch.testing.assert_close(found.cpu(), exact, rtol=1e-12, atol=1e-12)
    shape = Shape(tuple(kernel), stride, padding, dilation, 1, False, (0, 0))
    exact = (exact + (beta * d.cpu().double().sum((2, 3))).square().sum(1)).sqrt()
    norm = _by_products(x, d, beta, shape, torch.float32).cpu().double()
    assert bool((norm >= exact).all())
    torch.testing.assert_close(norm, exact, rtol=1e-3, atol=1e-3)


def test_a_record_that_is_not_finite_has_no_finite_norm_and_changes_no_other(interpreter):
    not_finite(interpreter)


def not_finite(device: torch.device) -> None:
    x, d = torch.randn(3, 4, 5, 5, device=device), torch.randn(3, 6, 3, 3, device=device)
    shape = Shape((3, 3), (1, 1), (0, 0), (1, 1), 1, False, (0, 0))
    others = _by_products(x, d, 1.0, shape, torch.float32)
    x[1, 0, 0, 0] = float("nan")
    found = _by_products(x, d, 1.0, shape, torch.float32)
    assert not bool(found[1].isfinite()) and torch.equal(found[[0, 2]], others[[0, 2]])


def test_positions_that_cancel_keep_a_share_of_the_factors_norms(interpreter):
    cancelling(interpreter)


def cancelling(device: torch.device) -> None:
    x = torch.full((1, 1, 1, 2), 1.0, device=device)
    d = torch.tensor([2.0**17, -(2.0**17)], device=device).view(1, 1, 1, 2)
    shape = Shape((1, 1), (1, 1), (0, 0), (1, 1), 1, False, (0, 0))
    assert float(_by_products(x, d, 0.0, shape, torch.float64)) >= 2.0**-12 * 2.0**18


def test_what_is_added_never_exceeds_the_norm(interpreter):
    added_above(interpreter)


def added_above(device: torch.device) -> None:
    """Cotangents whose scaled values all round towards a larger gradient, which is small beside its own terms."""
    scale = torch.tensor([1 / 3])
    d = 1 + torch.rand(1 << 16, generator=torch.Generator().manual_seed(0))
    order = (scale * d - scale.double() * d.double()).argsort()
    down, up = d[order[:32]], d[order[-32:]]
    x, d = torch.cat([-torch.ones(32), torch.ones(32)]), torch.cat([down, up])
    x[-1] = 12.0  # what is left when the others cancel
    x, d = (t.view(1, 1, 8, 8).to(device) for t in (x, d))
    shape = Shape((1, 1), (1, 1), (0, 0), (1, 1), 1, False, (0, 0))
    added = weight_gradient(x, d, scale.to(device), (1, 1), (1, 1), (0, 0), (1, 1))[0].abs().item()
    for product in (torch.float32, torch.float64):
        norm = _by_products(x, d, 0.0, shape, product).double().item()
        assert added <= scale.double().item() * norm < 1.01 * added
