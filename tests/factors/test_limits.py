"""Whatever the record, its scaled gradient respects radius, cotangent radius and cap."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weightclip.factors import CapNorm, Limits, Product, make_layer_private
from weightclip.factors._limits import (
    CAP,
    COTANGENT,
    RADIUS,
    cap_scale,
    implied,
    masked,
    record_norm,
    record_scale,
    squared_norm,
)

SLACK = 1 + 1e-4


def adversarial(case, seed: int):
    """Records of every size: ordinary, huge, tiny, zero, spikes, constants, cancelling positions."""
    layer = case.layer()
    x = case.inputs(10, seed)
    d = torch.randn(layer(x).shape, generator=torch.Generator().manual_seed(seed + 100))
    sizes = torch.tensor([1.0, 1e3, 1e6, 1e12, 1e17, 1e-3, 1e-12, 1e-30, 0.0, 1.0])
    shape = (-1,) + (1,) * (x.dim() - 1)
    if not case.tokens:
        x = x * sizes.view(shape)
        x[9] = 1.0
        half = x.shape[-1] // 2
        x[4, ..., :half] = -x[4, ..., half : 2 * half]
    d = d * sizes.roll(seed).view((-1,) + (1,) * (d.dim() - 1))
    d[9] = 1.0
    return layer, x, d


def norms_of(layer: nn.Module, x, d, exact, beta: float):
    found = exact(layer, x, d, beta)
    assert bool(torch.isfinite(found).all())
    return found.double().norm(dim=1)


@pytest.mark.parametrize("seed", range(5))
def test_cap(case, seed, made_private, exact):
    layer, x, d = adversarial(case, seed)
    for caps in (CapNorm.FREE, CapNorm.CHANNEL, CapNorm.POSITION, CapNorm.EXACT, CapNorm.CHEAPEST):
        twin = made_private(layer, cap=0.25, beta=0.6, caps=caps)
        assert float(norms_of(twin, x, d, exact, 0.6).max()) <= 0.25 * SLACK
        if not isinstance(layer, nn.modules.conv._ConvNd):
            break


@pytest.mark.parametrize("seed", range(3))
def test_radius_and_cotangent(case, seed, made_private, exact):
    layer, x, d = adversarial(case, seed)
    for radius, cotangent in ((0.5, 0.3), (100.0, 1e-3), (1e-3, 100.0)):
        twin = made_private(layer, radius=radius, cotangent=cotangent, beta=2.0)
        assert float(norms_of(twin, x, d, exact, 2.0).max()) <= radius * cotangent * SLACK


def test_one_of_two_limits(case, made_private, exact):
    layer, x, d = adversarial(case, 1)
    size = d.double().flatten(1).norm(dim=1).clamp(min=1e-300).view((-1,) + (1,) * (d.dim() - 1))
    d = (d.double() / size).float()
    assert float(norms_of(made_private(layer, radius=0.5), x, d, exact, 1.0).max()) <= 0.5 * SLACK


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize(
    "limits", [{"cap": 0.4}, {"radius": 1.0, "cotangent": 1.0}, {"radius": 1.0}, {"cotangent": 1.0}]
)
def test_a_record_that_is_not_finite_contributes_exactly_nothing(case, bad, limits, made_private):
    layer = case.layer()
    x = case.inputs(4)
    d = torch.randn(layer(x).shape, generator=torch.Generator().manual_seed(5))
    twin = made_private(layer, **limits)
    keep = [0, 1, 3]
    want = torch.autograd.grad(twin(x[keep]), list(twin.parameters()), d[keep])
    poisoned = d.clone()
    poisoned[2].view(-1)[0] = bad
    if not case.tokens and bad != 3e38:
        x = x.clone()
        x[2].view(-1)[-1] = bad
    got = torch.autograd.grad(twin(x), list(twin.parameters()), poisoned)
    for a, b in zip(got, want, strict=True):
        assert bool(torch.isfinite(a).all())
        if math.isfinite(bad):
            continue  # its square overflows: dropped or scaled, but finite
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_input_alone_not_finite(case, made_private):
    if case.tokens:
        pytest.skip("token ids are finite")
    layer = case.layer()
    twin = made_private(layer, cap=0.4)
    x = case.inputs(3)
    d = torch.randn_like(layer(x)).detach()
    want = torch.autograd.grad(twin(x[:2]), list(twin.parameters()), d[:2])
    x = x.clone()
    x[2] = math.nan
    for a, b in zip(torch.autograd.grad(twin(x), list(twin.parameters()), d), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_cotangents_beyond_float32_in_a_float64_model(case, made_private, exact):
    layer = case.layer(torch.float64)
    x = case.inputs(3, dtype=torch.float64)
    d = torch.randn_like(layer(x)).detach()
    d[1] *= 1e60
    if not case.tokens:
        x[2] *= 1e50
    for limits in ({"cap": 0.5}, {"radius": 0.5, "cotangent": 1.0}):
        found = exact(made_private(layer, **limits), x, d)
        assert bool(torch.isfinite(found).all())
        assert float(found.norm(dim=1).max()) <= 0.5 * SLACK


@pytest.mark.parametrize("product", [Product(), Product(torch.float32)])
def test_exact_caps_where_positions_cancel(product, made_private, exact):
    """delta_1 x_1 = -delta_2 x_2 (1 + tiny): Grams lose the difference, the product does not.

    A record whose gradient is 1e-7 of ||x|| ||delta|| passes a cap measured by Grams alone unscaled.
    """
    torch.manual_seed(0)
    layer = nn.Linear(4, 3, bias=False)
    worst = 0.0
    for power in range(2, 12):
        for tiny in (0.0, 2.0**-23, 2.0**-20, 2.0**-12, 2.0**-6):
            x = torch.randn(1, 2, 4)
            x[:, 1] = -x[:, 0] * (1 + tiny)
            d = torch.randn(1, 1, 3).expand(1, 2, 3) * (1 + 2.0**-22)
            twin = made_private(layer, cap=1.0, product=product)
            found = exact(twin, x * 10.0**power, d.clone())
            worst = max(worst, float(found.double().norm()))
    assert worst <= SLACK
    assert worst > 0.5


def test_exact_caps_of_convolutions_where_positions_cancel(made_private, exact):
    torch.manual_seed(0)
    layer = nn.Conv1d(2, 2, 1, bias=False)
    for caps in CapNorm:
        for product in (Product(), Product(torch.float32)):
            for power in (3, 6, 9):
                x = torch.randn(1, 2, 2)
                x[:, :, 1] = -x[:, :, 0] * (1 + 2.0**-21)
                d = torch.randn(1, 2, 1).expand(1, 2, 2).clone()
                twin = made_private(layer, cap=1.0, caps=caps, product=product)
                assert float(exact(twin, x * 10.0**power, d).double().norm()) <= SLACK


def test_no_library_forms_covered_float32_products_on_gpus():
    """cuDNN convolves float32 as TF32 unless told otherwise: 2^-11 of each operand, which no slack has."""
    conv, dense, table = nn.Conv2d(2, 2, 3), nn.Linear(2, 2), nn.Embedding(4, 2)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for asked in (Product(torch.float32), Product(torch.float32, chunk=8)):
        for layer in (conv, dense, table):
            assert asked.resolve(layer, cuda, 32) == Product().resolve(layer, cuda, 32) != asked
            assert asked.resolve(layer, cpu) is asked
    for asked in (Product(torch.float32, chunk=1), Product(torch.float64, chunk=8), Product.fast()):
        assert asked.resolve(conv, cuda) is asked


def test_tiny_inputs_meet_huge_cotangents(made_private, exact):
    """Squares of 1e-24 vanish in float32; the product with 1e18 does not."""
    layer = nn.Linear(10_000, 1, bias=False)
    x, d = torch.full((1, 10_000), 1e-24), torch.full((1, 1), 1e18)
    free = float(exact(layer, x, d).norm())
    assert free > 9e-5
    assert float(exact(made_private(layer, cap=1e-6), x, d).norm()) <= 1e-6 * SLACK


def test_empty_batches(case, made_private):
    twin = made_private(case.layer(), cap=1.0, radius=1.0, cotangent=1.0)
    y = twin(case.inputs(4)[:0])
    y.sum().backward()
    assert all(q.grad is None or not bool(q.grad.any()) for q in twin.parameters())


def test_record_scale_by_hand():
    limits = torch.tensor([2.0, 3.0, 5.0])
    x, d = torch.tensor([1.0, 4.0, 0.0, math.inf, 4.0]), torch.tensor([1.0, 6.0, 7.0, 1.0, math.nan])
    assert record_scale(x, d, limits, 0) is None
    assert record_scale(x, d, limits, 1).tolist() == [1.0, 0.5, 1.0, 0.0, 0.0]
    assert record_scale(x, d, limits, 3).tolist() == pytest.approx([1.0, 0.25, 3 / 7, 0.0, 0.0])
    assert record_scale(x, d, limits, 7).tolist() == pytest.approx([1.0, 5 / 24, 3 / 7, 0.0, 0.0])


@pytest.mark.parametrize("cap", [1.0, 0.01, 1e-5, 1e-7, 1e-12])
def test_scales_below_the_normal_numbers_do_not_exceed_the_cap(cap):
    """cap/product is subnormal for a huge product, and would round by up to its own size."""
    x, d, limits = torch.logspace(17, 19.2, 400), torch.full((400,), 1e19), torch.tensor([1.0, 1.0, cap])
    for scale in (record_scale(x, d, limits, CAP), cap_scale(None, x * d, x, d, limits[2])):
        assert scale is not None
        assert bool((scale.double() * x.double() * d.double() <= limits[2].double() * (1 + 64 * 2.0**-24)).all())


def test_masking_is_exact():
    value, scale = torch.tensor([[1.0, math.nan], [2.0, 4.0]]), torch.tensor([0.0, 0.5])
    assert masked(value, scale, True).tolist() == [[0.0, 0.0], [1.0, 2.0]]
    assert masked(value, scale, False).tolist() == [[0.0, 0.0], [2.0, 4.0]]
    assert masked(value, None, True) is value


def test_squared_norm_never_below():
    assert float(squared_norm(torch.full((1, 100), 1e-30))) >= 100 * 1e-60
    assert float(squared_norm(torch.tensor([[3.0, 4.0]]))) == 25.0
    assert squared_norm(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.float32


def capped_beside_radii(share: float) -> tuple[Tensor, Limits]:
    """The limits of a layer with both radii (their product 0.06) and a cap of ``share`` of it."""
    layer: Any = nn.Linear(3, 2)
    make_layer_private(layer, radius=0.3, cotangent=0.2, cap=math.inf, bound=True)
    limits = Limits([layer], [True], [1.0])
    limits.set(torch.tensor([share * 0.06], dtype=torch.float64), constant=True)
    return layer._wc_limits, limits


def caps_that_radii_do_not_keep_act() -> None:
    """Whether a cap lies below the product of both radii, or is written there later."""
    g = torch.Generator().manual_seed(0)
    x, d = 3 * torch.rand(500, generator=g), 3 * torch.rand(500, generator=g)
    for share in (0.5, 1.0 - 2.0**-20, 1.0 + 2.0**-21):
        row, _ = capped_beside_radii(share)
        scale = record_scale(x, d, row, RADIUS | COTANGENT | CAP)
        assert scale is not None and float((scale * x * d).max()) <= float(row[2]) * (1 + 2.0**-21)
    row, limits = capped_beside_radii(1.1)
    limits.table[:, 2] = 0.01
    scale = record_scale(x, d, row, RADIUS | COTANGENT | CAP)
    assert scale is not None and float((scale * x * d).max()) <= 0.01 * (1 + 2.0**-21)


def test_caps_that_radii_do_not_keep_act() -> None:
    caps_that_radii_do_not_keep_act()


def test_a_cap_that_both_radii_keep_changes_no_bit() -> None:
    """Records of every size, at products of radii that round up in every way."""
    g = torch.Generator().manual_seed(1)
    sizes = torch.tensor([0.0, 1e-38, 1e-19, 1e-3, 1.0, 3.0, 1e5, 1e19, 1e30, math.inf, math.nan])
    x, d = torch.cartesian_prod(sizes, sizes).unbind(1)
    x = torch.cat([x, 3 * torch.rand(5000, generator=g)])
    d = torch.cat([d, 3 * torch.rand(5000, generator=g)])
    for part in (slice(None), slice(len(sizes) ** 2, None)):
        row, limits = capped_beside_radii(1 + 2.0**-18)
        assert implied(row) and not implied(copy.deepcopy(row))
        short = record_scale(x[part], d[part], row, RADIUS | COTANGENT | CAP)
        limits.table.mul_(1.0)  # written: asked anew
        assert not implied(row)
        whole = record_scale(x[part], d[part], row, RADIUS | COTANGENT | CAP)
        assert short is not None and whole is not None
        usual = torch.isfinite(x[part] * d[part])  # beyond, the cap's own arithmetic overflows and drops the record
        assert torch.equal(short[usual], whole[usual])
        kept = short.double() * torch.where(short > 0, x[part].double() * d[part].double(), 0)
        assert float(kept.max()) <= 0.06 * (1 + 2.0**-20)


def test_record_norm_never_below():
    """Squares that vanish in float32 count; those of ordinary size give the bits of the root of their sum."""
    for size in (1e-45, 1e-38, 1e-30, 1e-22, 1e-20, 1e-19, 1e-10, 1.0, 1e15):
        value = torch.full((1, 100), size)
        assert float(record_norm(value)) >= 10 * float(value[0, 0]) * (1 - 2.0**-22)
    value = torch.randn(1000, 30, generator=torch.Generator().manual_seed(0))
    assert torch.equal(record_norm(value), squared_norm(value).sqrt())
    assert record_norm(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.float32
