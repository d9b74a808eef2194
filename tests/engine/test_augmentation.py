"""Augmentation multiplicity and the release grid: views are averaged per record, rounding comes after the noise."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from tests.engine_kit import pin
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weightclip as wc
from weightclip.errors import ContractError, WeightclipError
from weightclip.noise._streams import NOISE, Streams


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def views_of(x: Tensor, m: int) -> Tensor:
    """Record-major views: a fixed public augmentation, large enough to tell views apart."""
    shifts = torch.arange(m, dtype=x.dtype).view(1, m, 1)
    return (x[:, None] * (1 + shifts) + torch.sin(7 * shifts)).flatten(0, 1)


def run(x: Tensor, y: Tensor, m: int, bounds: wc.Bounds, *, sigma: float = 0.0, b: float = 6, per_view: bool = False,
        steps: int = 1, model: nn.Module | None = None, **settings):  # fmt: skip
    engine = wc.PrivacyEngine()
    model = net() if model is None else model
    model, optimizer, loader, loss = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=sigma, bounds=bounds,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)), criterion=nn.CrossEntropyLoss(),
        expected_batch_size=b, augmentation_multiplicity=m, generator=torch.Generator().manual_seed(3), **settings,
    )  # fmt: skip
    pin(engine, 3)  # noise that other runs share
    values = []
    for a, target in list(loader)[:steps] if steps == 1 else loader:
        optimizer.zero_grad()
        value = loss(model(views_of(a, m)), target.repeat_interleave(m) if per_view else target)
        value.backward()
        optimizer.step()
        values.append(value.item())
    return engine, [p.grad.detach().clone() for p in model.parameters() if p.grad is not None], values


def record_sums(engine: wc.PrivacyEngine, a: list[Tensor], b: list[Tensor]) -> list[float]:
    return [math.sqrt(float((a[i] - b[i]).square().sum() + (a[i + 1] - b[i + 1]).square().sum())) for i in (0, 2)]


X, Y = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)) * 4, torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("per_view", [False, True])
def test_without_limits_the_gradient_is_that_of_the_average_view(m, per_view):
    plain = net()
    value = F.cross_entropy(plain(views_of(X, m)), Y.repeat_interleave(m))
    value.backward()
    _, grads, values = run(X, Y, m, wc.Bounds(input_radius=1e6), per_view=per_view)
    assert values[0] == pytest.approx(value.item(), rel=1e-5)
    for mine, p in zip(grads, plain.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-4, atol=1e-6)


BOUNDS = [wc.Bounds(layer_radius=0.5, cotangent_radius=0.2), wc.Bounds(layer_cap=0.1), wc.Bounds(joint_cap=0.1),
          wc.Bounds(input_radius=1.0)]  # fmt: skip


@pytest.mark.parametrize("bounds", BOUNDS)
def test_black_box_one_record_moves_the_release_by_at_most_delta_over_b(bounds):
    """All views of the added record point the same way: the worst case of their sum."""
    m = 4
    engine, with_it, _ = run(X, Y, m, bounds)
    _, without, _ = run(X[:5], Y[:5], m, bounds)
    deltas = list(engine.certificate().sensitivities.values())
    moved = record_sums(engine, with_it, without)
    assert all(6 * v <= d for v, d in zip(moved, deltas, strict=True))
    if bounds.layer_cap is not None:  # and the bound is reached: the cap bites on every view, in one direction
        big = torch.cat([X[:5], X[5:6] * 0 + 50.0])
        _, with_it, _ = run(big, Y, m, bounds)
        moved = record_sums(engine, with_it, without)
        assert all(6 * v <= d for v, d in zip(moved, deltas, strict=True))
        assert max(6 * v / d for v, d in zip(moved, deltas, strict=True)) > 0.6


def test_noise_does_not_depend_on_the_number_of_views():
    """Sensitivity of the sum is M Delta, its divisor b M: relative to one record's share the noise stays Delta/b."""
    bounds = wc.Bounds(layer_radius=0.5, cotangent_radius=0.2)
    released = {}
    for m in (1, 5):
        _, quiet, _ = run(X, Y, m, bounds)
        engine, noisy, _ = run(X, Y, m, bounds, sigma=2.0)
        released[m] = [a - b for a, b in zip(noisy, quiet, strict=True)]
        assert engine.report()["public"]["augmentation_multiplicity"] == m
        assert engine.report()["joint_multiplier"] == pytest.approx(2.0)
    for a, b in zip(released[1], released[5], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_dividing_before_the_radius_would_break_the_bound():
    """The mutant: radii enforced on delta/M let M views add up to M times the promised sum over b M."""
    m, radius = 4, 0.2
    layer, x = nn.Linear(5, 3, bias=False), torch.ones(1, 5) / math.sqrt(5)
    views = x.expand(m, 5)
    delta = torch.stack([F.one_hot(torch.tensor(0), 3) - torch.softmax(layer(v), 0) for v in views]).detach()
    scaled = delta / m
    scaled = scaled * (radius / scaled.norm(dim=1, keepdim=True)).clamp(max=1)  # the radius after the division
    wrong = (scaled.t() @ views).norm()
    right = ((delta * (radius / delta.norm(dim=1, keepdim=True)).clamp(max=1)).t() @ views / m).norm()
    assert wrong > 2 * radius >= radius * (1 + 1e-6) >= right


def test_padding_masks_every_view():
    """Pieces of three of the six records: the padded records' views contribute nothing, the sum is the same."""
    bounds = wc.Bounds(layer_cap=0.1)
    _, whole, _ = run(X, Y, 3, bounds)
    engine = wc.PrivacyEngine()
    model = net()
    model, optimizer, loader, loss = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=0.0, bounds=bounds,
        data_loader=DataLoader(TensorDataset(X, Y), batch_size=6), criterion=nn.CrossEntropyLoss(),
        expected_batch_size=6, augmentation_multiplicity=3, max_physical_batch_size=4,
        generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    for a, target in loader:
        optimizer.zero_grad()
        loss(model(views_of(a, 3)), target).backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(mine.grad, theirs, rtol=1e-5, atol=1e-7)


def test_wrong_number_of_views_is_refused():
    with pytest.raises(ContractError, match="of 2 views each"):
        engine = wc.PrivacyEngine()
        model = net()
        model, _, loader, loss = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=1.0,
            data_loader=DataLoader(TensorDataset(X, Y), batch_size=6), criterion=nn.CrossEntropyLoss(),
            augmentation_multiplicity=2,
        )  # fmt: skip
        for a, target in loader:
            loss(model(a), target)
    for wrong in (0, 1.5, True):
        with pytest.raises(WeightclipError, match="augmentation_multiplicity"):
            run(X, Y, wrong, wc.Bounds(input_radius=1.0))  # type: ignore[arg-type]


def test_float32_products_count_every_view_in_the_slack():
    bounds = wc.Bounds(input_radius=1.0, product=wc.Product(torch.float32))
    one, _, _ = run(X, Y, 1, bounds)
    four, _, _ = run(X, Y, 4, bounds)
    assert all(b > a for a, b in zip(one.training.release.slack, four.training.release.slack, strict=True))


# -- the grid ---------------------------------------------------------------------------------------------------------


def test_grid_rounds_what_is_released_after_the_noise():
    bounds, grid = wc.Bounds(layer_radius=0.5, cotangent_radius=0.2), 2.0**-6
    _, plain, _ = run(X, Y, 1, bounds, sigma=1.5)
    engine, rounded, _ = run(X, Y, 1, bounds, sigma=1.5, release_grid=grid)
    for a, b in zip(plain, rounded, strict=True):
        assert torch.equal(b / grid, (b / grid).round())
        assert float((a - b).abs().max()) <= grid / 2 * (1 + 1e-6)
        assert b.unique().numel() > 1
    assert engine.report()["public"]["release_grid"] == grid
    sensitivities = engine.certificate().sensitivities
    assert sensitivities == copy.copy(run(X, Y, 1, bounds)[0].certificate().sensitivities)  # free of charge
    with pytest.raises(WeightclipError, match="release_grid"):
        run(X, Y, 1, bounds, release_grid=0.0)


def test_rounding_before_the_noise_would_show_in_the_bits():
    """The mutant: with rounding first, the noise's own float pattern stays on the release."""
    grid = 2.0**-6
    noise = Streams.seeded(1).normal_(torch.empty(64), NOISE, 0)
    wrong = (torch.randn(64) / grid).round() * grid + noise
    assert not torch.equal(wrong / grid, (wrong / grid).round())
