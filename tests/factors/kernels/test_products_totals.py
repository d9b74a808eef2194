"""Sums over positions that come with norms: one read of the factors (in Triton's interpreter without a GPU)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.triton_kit import kernel_device, run_interpreted
from torch import Tensor, nn

from weightclip.factors import Product, _affine, _dense, make_layer_private
from weightclip.factors._limits import record_scale, squared_norm
from weightclip.factors.kernels import _products, _products_totals
from weightclip.factors.kernels._products import fused_scale, over_records, tile_bias
from weightclip.factors.kernels._products_totals import fits_totals, keep, kept, scale_and_totals

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy, at NaN and infinity

SHAPES = [  # records, positions, inputs, outputs
    (4, 64, 3, 5),
    (3, 70, 200, 20),
    (5, 129, 7, 70),
    (2, 65, 150, 200),  # four blocks of channels, the last of them in part
    (3, 66, 1, 1),
]


@pytest.fixture
def device() -> torch.device:
    return kernel_device()


def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def factors(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, bad: bool = True) -> tuple[Tensor, ...]:
    """Inputs and cotangents; record 1 has an input that is not a number, the last one an infinite cotangent."""
    records, places, inputs, outs = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x, d = (torch.randn(records, places, n, generator=generator).to(dtype) for n in (inputs, outs))
    if bad:
        x[1, -1, -1], d[-1, -1, -1] = math.nan, math.inf
    return x.to(device), d.to(device)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_and_sums_are_those_of_float64(shape, dtype, device) -> None:
    found_together(device, shape, dtype)


def found_together(device: torch.device, shape=SHAPES[3], dtype=torch.bfloat16) -> None:
    x, d = factors(shape, dtype, device)
    bias, size = 0.4 * shape[1], math.sqrt(shape[1])
    limits = torch.tensor([1.1 * size, 0.9 * size, 0.7 * shape[1]], device=device)
    for flags in (1, 2, 4, 7):
        scale, totals = scale_and_totals(x, d, limits, flags, bias)
        x_norm, d_norm = (squared_norm(x.double()) + bias).sqrt(), squared_norm(d.double()).sqrt()
        expected = record_scale(x_norm, d_norm, limits.double(), flags)
        assert expected is not None
        torch.testing.assert_close(scale.double(), expected, rtol=1e-5, atol=0.0)
        assert not scale[1] and not scale[-1] and bool((scale <= 1).all())
        torch.testing.assert_close(scale, fused_scale(x, d, limits, flags, bias), rtol=1e-5, atol=0.0)
    assert totals.dtype == torch.float32 and totals.shape == (shape[0], 1, shape[3])
    keep = scale > 0
    weighted = scale[keep].double()[:, None] * d[keep].double().sum(1)
    room = (shape[1] + 8) * 2.0**-24 * size * (scale[keep].double() * d[keep].double().flatten(1).norm(dim=1)).sum()
    found = over_records(totals, scale)
    assert found.dtype == torch.float64 and found.shape == (1, shape[3])
    assert float((found[0] - weighted.sum(0)).norm()) <= float(room)
    assert float((found[0] - tile_bias(d, scale)).norm()) <= 2 * float(room)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_numbers_of_a_record_do_not_depend_on_the_others(shape, device) -> None:
    x, d = factors(shape, torch.float32, device)
    limits = torch.tensor([1.0, 2.0, 3.0], device=device)
    scale, totals = scale_and_totals(x, d, limits, 3, 0.5)
    for i in range(len(x)):
        own, alone = scale_and_totals(x[i : i + 1], d[i : i + 1], limits, 3, 0.5)
        assert own[0] == scale[i] and torch.equal(alone[0].nan_to_num(7.0), totals[i].nan_to_num(7.0))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("records", [1, 5, 70, 130])
def test_sums_over_records_are_scaled_and_float64(records, kind, device) -> None:
    scaled_sums(device, records, kind)


def scaled_sums(device: torch.device, records: int = 130, kind: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(records)
    totals = torch.randn(records, 2, 35, generator=generator, dtype=torch.float64).to(device=device, dtype=kind)
    scale = torch.rand(records, generator=generator).to(device)
    plain = over_records(totals, None)
    torch.testing.assert_close(plain, totals.double().sum(0), rtol=1e-13, atol=1e-13)
    totals[0], scale[0] = math.nan, 0.0
    found = over_records(totals, scale)
    expected = (scale.to(kind)[1:, None, None] * totals[1:]).double().sum(0)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_what_is_kept_is_for_these_factors_once() -> None:
    x, d, other = torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3)
    assert kept(x, d) is None
    totals = torch.zeros(2, 1, 3)
    keep(x, d, totals)
    assert kept(x, d) is totals and kept(x, d) is None
    keep(x, d, totals)
    assert kept(other, d) is None and kept(x, d) is None  # gone: nobody else may have it either
    keep(x, d, totals)
    assert kept(x.detach(), d) is None
    keep(x, d, totals)
    assert kept(x, d.detach()) is None and kept(x, d.view(2, 3)) is None
    for written in (x, d):
        keep(x, d, totals)
        written.add_(1.0)
        assert kept(x, d) is None
    alias = d.detach()  # as factors are of what autograd keeps
    keep(x, d, totals)
    alias.zero_()
    assert kept(x, d) is None
    later = torch.ones(2, 1, 3)
    keep(x, d, totals)
    keep(x, d, later)
    assert kept(x, d) is later


def test_few_positions_large_records_and_inference_keep_nothing() -> None:
    x = torch.empty(2, 64, 3, device="meta")
    assert fits_totals(x, x, 64) and not fits_totals(x, x, 63)
    large = torch.empty(2, 2**14, 2**14, device="meta")
    assert not fits_totals(large, x, 2**14) and not fits_totals(x, large, 2**14)
    with torch.inference_mode():
        quick = torch.empty(2, 64, 3)
    assert not fits_totals(quick, x, 64) and not fits_totals(x, quick, 64)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tiles: bool = True) -> list[str]:
    """The ways that tensors of a GPU go; returns a list of the sums that are found by a second read."""
    read: list[str] = []

    def again(name: str, find: Any) -> Any:
        return lambda *args: (read.append(name), find(*args))[1]

    monkeypatch.setattr(_dense, "_tiled", lambda x, d, product: tiles and d.numel() > 0)
    monkeypatch.setattr(_dense, "fits_scale", lambda x, d, flags: d.numel() > 0)
    monkeypatch.setattr(_affine, "fits", lambda x, d: d.numel() > 0)
    monkeypatch.setattr(_dense, "tile_bias", again("bias", tile_bias))
    monkeypatch.setattr(_affine, "record_sums", again("affine", _products.record_sums))
    return read


def made(layer: nn.Module, device: torch.device, **limits: Any) -> Any:
    make_layer_private(layer.to(device), product=Product(torch.float32, 1), **limits)
    return layer


DENSE_LIMITS: list[dict[str, Any]] = [{"radius": 9.0, "cotangent": 5.0}, {"cap": 20.0, "bound": True}]


@pytest.mark.parametrize("limits", DENSE_LIMITS)
@torch.no_grad()
def test_a_dense_layer_reads_its_cotangents_once_for_its_scale_and_its_bias(limits, device, monkeypatch) -> None:
    dense_layer(device, monkeypatch, limits)


def dense_layer(device: torch.device, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any]) -> None:
    read, layer = as_on_a_gpu(monkeypatch), made(nn.Linear(6, 9), device, **limits)
    x, d = factors((4, 66, 6, 9), torch.bfloat16, device)
    most = limits.get("cap", 45.0)
    scale = _dense.DENSE.scale(layer, x, d, None, ())
    _, bias = _dense.DENSE.sums(layer, x, d, scale, ())
    assert scale is not None and bias is not None and not read and not scale[1] and not scale[3]
    exact = (scale.double()[:, None] * d.double().sum(1))[[0, 2]].sum(0)
    torch.testing.assert_close(bias, exact, rtol=1e-5, atol=1e-5)
    for i in (0, 2):  # one record alone: weight and bias together respect the limit
        one = x[i : i + 1], d[i : i + 1]
        parts = _dense.DENSE.sums(layer, *one, _dense.DENSE.scale(layer, *one, None, ()), ())
        assert math.hypot(*(float(p.double().norm()) for p in parts if p is not None)) <= most * (1 + 1e-4)
    assert not read
    scale = _dense.DENSE.scale(layer, x, d, None, ())
    d *= 2.0  # what was kept is of other numbers
    torch.testing.assert_close(_dense.DENSE.sums(layer, x, d, scale, ())[1], 2 * bias, rtol=1e-5, atol=1e-5)
    assert read == ["bias"]


@torch.no_grad()
def test_dense_layers_that_keep_nothing(device, monkeypatch) -> None:
    """Few positions, a bias that is not trained, exact norms, a padded copy of the cotangents: a second read."""
    read = as_on_a_gpu(monkeypatch)
    for layer, places in (
        (made(nn.Linear(6, 9), device, radius=9.0, cotangent=5.0), 40),
        (made(nn.Linear(6, 9), device, cap=5.0), 66),
    ):
        x, d = factors((3, places, 6, 9), torch.float32, device, bad=False)
        if layer._wc_flags & 4:
            monkeypatch.setattr(_dense, "dense_norm", lambda x, d, beta, product: torch.ones(len(x), device=x.device))
        scale = _dense.DENSE.scale(layer, x, d, None, ())
        assert "_wc_totals" not in d.__dict__
        _dense.DENSE.sums(layer, x, d, scale, ())
    assert read == ["bias"] * 2
    layer = made(nn.Linear(6, 9, bias=False), device, radius=9.0, cotangent=5.0)
    x, d = factors((3, 66, 6, 9), torch.float32, device, bad=False)
    _dense.DENSE.scale(layer, x, d, None, ())
    assert "_wc_totals" not in d.__dict__


@torch.no_grad()
def test_a_batch_without_records(device, monkeypatch) -> None:
    as_on_a_gpu(monkeypatch)
    layer = made(nn.Linear(6, 9), device, radius=9.0, cotangent=5.0)
    norm = made(nn.LayerNorm(6), device, radius=9.0, cotangent=5.0)
    x, d = torch.zeros(0, 66, 6, device=device), torch.zeros(0, 66, 9, device=device)
    for kind, part, factors in ((_dense.DENSE, layer, (x, d)), (_affine.TRAILING, norm, (x, x.clone()))):
        found = kind.sums(part, *factors, kind.scale(part, *factors, None, ()), ())
        assert all(part is not None and not part.any() for part in found)


AFFINE_LIMITS: list[dict[str, Any]] = [{"radius": 9.0, "cotangent": 5.0}, {"cap": 3.0, "bound": True}, {"cap": 2.0}]


@pytest.mark.parametrize("limits", AFFINE_LIMITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first", [False, True])
@torch.no_grad()
def test_a_normalisation_reads_its_factors_once(limits, dtype, first, device, monkeypatch) -> None:
    affine_layer(device, monkeypatch, limits, dtype, first)


def affine_layer(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any], dtype: torch.dtype, first: bool
) -> None:  # fmt: skip
    read = as_on_a_gpu(monkeypatch)
    layer = made(nn.GroupNorm(1, 70) if first else nn.LayerNorm(70), device, beta=0.5, **limits)
    x, d = factors((4, 66, 70, 70), dtype, device)
    if first:
        x, d = (t.mT.contiguous() for t in (x, d))
    kind, most, dim = layer._wc_form, limits.get("cap", 45.0), 2 if first else 1
    scale = kind.scale(layer, x, d, None, ())
    found = kind.sums(layer, x, d, scale, ())
    assert not read and not scale[1] and not scale[3] and float(scale[[0, 2]].min()) > 0
    weighted = (scale.double()[:, None, None] * d.double())[[0, 2]]
    torch.testing.assert_close(found[0], (weighted * x.double()[[0, 2]]).sum((0, dim)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], weighted.sum((0, dim)), rtol=1e-12, atol=1e-12)
    norm = kind.norm(layer, x, d, 0, ())
    found = kind.sums(layer, x, d, torch.tensor([1.0, 0.0, 0.0, 0.0], device=device), ())
    assert not read and float(norm[0]) >= math.hypot(float(found[0].norm()), 0.5 * float(found[1].norm()))
    assert "_wc_totals" not in d.__dict__ and torch.isinf(norm[[1, 3]]).all()
    for i in (0, 2):
        one = x[i : i + 1], d[i : i + 1]
        gain, offset = kind.sums(layer, *one, kind.scale(layer, *one, None, ()), ())
        assert math.hypot(float(gain.norm()), 0.5 * float(offset.norm())) <= most * (1 + 1e-6)
    assert not read


@torch.no_grad()
def test_what_squares_hide_is_limited(device) -> None:
    hidden(device)


def hidden(device: torch.device) -> None:
    tiny, large = (torch.full((3, 64, 5), value, device=device) for value in (1e-23, 1e16))
    limits = torch.tensor([1.0, 1.0, 1e-8], device=device)
    for x, d in ((tiny, large), (large, tiny)):
        found, _ = scale_and_totals(x, d, limits, 4, 0.0)
        product = x.double().flatten(1).norm(dim=1) * d.double().flatten(1).norm(dim=1)
        assert bool((found > 0).all()) and bool((found * product <= 1e-8).all())


def test_wide_records_take_more_programs(device, monkeypatch) -> None:
    """Inputs far wider than cotangents, and the other way round: every number is read once."""
    for shape in ((2, 64, 700, 3), (2, 64, 3, 300)):
        found_together(device, shape, torch.float32)
    monkeypatch.setattr(_products_totals, "_DEPTH", 16)
    found_together(device)
