"""Adversarial neighbours for float32 sums (SOUNDNESS section 6): an ordinary sum moves by 2 Delta, ours does not.

Half of the records bring the sum to a power of two. There the spacing of float32 doubles, so that the small records
that follow round one way below it (without the extra record) and the other way above it (with it).
"""

from __future__ import annotations

import pytest
import torch
from tests.engine_kit import private, release
from torch import Tensor, nn

import weightclip as wc


def records(b: int, extra: bool) -> tuple[Tensor, Tensor]:
    """b (or b + 1) records for a one-weight layer whose gradient is x * y, at most 1 in size."""
    u = b / 2 * 2.0**-24  # spacing just below b/2
    build = torch.ones(b // 2)
    build[-1] -= 2 * u
    triples = torch.tensor([1.2 * u, -0.6 * u, -0.6 * u]).repeat(b // 6)
    values = torch.cat([torch.ones(int(extra)), build, triples])
    return values.abs()[:, None], values.sign()


def linear_loss() -> wc.PerRecordLoss:
    return wc.PerRecordLoss(lambda z, y: z[:, 0] * y, bound=1.0)


def one_weight() -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)  # w - G is then exact: the release can be read from the parameter
    return layer


def stock_sum(data: tuple[Tensor, Tensor]) -> float:
    """What gradient accumulation over single records gives with an ordinary layer."""
    layer, (x, y) = one_weight(), data
    for i in range(len(x)):
        (layer(x[i : i + 1])[0, 0] * y[i]).backward()
    assert layer.weight.grad is not None
    return float(layer.weight.grad)


@pytest.mark.parametrize(("b", "least"), [(1024, 1.015), (8192, 1.95)])
def test_an_ordinary_float32_sum_moves_by_more_than_one_record(b: int, least: float) -> None:
    moved = stock_sum(records(b, True)) - stock_sum(records(b, False))
    assert moved > least
    exact = records(b, True)[0].double().T @ records(b, True)[1].double() - (
        records(b, False)[0].double().T @ records(b, False)[1].double()
    )
    assert abs(float(exact) - 1) < 1e-9  # in exact arithmetic the extra record moves the sum by exactly Delta


@pytest.mark.parametrize("b", [1024, 8192, 16384])
@pytest.mark.parametrize(
    ("product", "physical"),
    [(wc.Product(), None), (wc.Product(), 64), (wc.Product(dtype=torch.float32, chunk=256), None)],
)
def test_the_released_sum_moves_by_at_most_the_reported_sensitivity(
    b: int, product: wc.Product, physical: int | None
) -> None:
    bounds = wc.Bounds(layer_radius=1.0, cotangent_radius=1.0, product=product)
    moved, sensitivity = [], []
    for extra in (False, True):
        run = private(
            one_weight(), records(b, extra), bounds=bounds, criterion=linear_loss(), batch=b, sample_rate=1.0,
            max_physical_batch_size=physical,
        )  # fmt: skip
        sensitivity.append(run.layers()[""]["sensitivity"])
        moved.append(float(release(run)["weight"]))
    assert sensitivity[0] == sensitivity[1]
    assert 0.99 < moved[1] - moved[0] <= sensitivity[0]
    if product.dtype == torch.float64:
        assert sensitivity[0] < 1.02  # no price worth speaking of, whatever the number of physical batches


def test_every_entry_on_a_rounding_tie_stays_within_the_sensitivity() -> None:
    """16 equal entries near 2^k whose float32 roundings all flip when one record comes in."""
    b, wide = 4096, 16
    bounds = wc.Bounds(layer_radius=1.0, cotangent_radius=1.0)
    worst = 0.0
    for nudge in (0.5, 0.49, 0.51):
        u = b / 8 * 2.0**-23  # spacing just above the entries' sum, b / (2 sqrt(wide))
        sums = []
        for extra in (0, 1):
            x = torch.full((b // 2 + 2, wide), 0.25, dtype=torch.float32)
            x[-2] = nudge * u if extra == 0 else 2 * nudge * u
            x[-1] = 0.25 * extra  # the record that is added: all of its norm in the direction of the others
            keep = b // 2 + 1 + extra
            layer = nn.Linear(wide, 1, bias=False)
            nn.init.zeros_(layer.weight)
            run = private(
                layer, (x[:keep], torch.ones(keep)), bounds=bounds, criterion=linear_loss(), batch=b, sample_rate=1.0
            )
            sums.append(release(run)["weight"])
            sensitivity = run.layers()[""]["sensitivity"]
        worst = max(worst, float((sums[1] - sums[0]).norm()) / sensitivity)
    # x[-2] differs too, by nudge * u per entry: a rounding unit, which the comparison gives to the adversary
    assert 0.99 < worst <= 1
