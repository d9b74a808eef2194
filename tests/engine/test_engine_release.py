"""Black box: what one record can move. Only parameters before and after a step are read; there is no noise."""

from __future__ import annotations

import math

import pytest
import torch
from tests.engine_kit import cnn, difference, layer_norms, mlp, pictures, private, release, residual, table
from torch import Tensor, nn

import weightclip as wc

BOUNDS = {
    "weights": wc.Bounds(input_radius=1.0),
    "clipped": wc.Bounds(input_radius=1.0, weight_norm=0.8, bias_scale=0.5),
    "radii": wc.Bounds(layer_radius=0.7, cotangent_radius=0.3, bias_scale=2.0),
    "layer cap": wc.Bounds(layer_cap=0.2),
    "joint cap": wc.Bounds(joint_cap=0.3),
    "l1": wc.Bounds(input_radius=1.0, p=1),
    "linf": wc.Bounds(input_radius=1.0, p=math.inf),
}
MODELS = {"mlp": (mlp, table), "cnn": (cnn, pictures), "residual": (residual, table)}


def strange_records(x: Tensor, y: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """Records a data set may hold whatever its owner believes."""
    ones, first = torch.ones_like(x[0]), x[0]
    found = [
        ("huge", 1e30 * first, y[0]),
        ("largest float", torch.full_like(first, 3e38), y[1]),
        ("huge against the others", -1e6 * x.mean(0), y[0]),
        ("one coordinate", torch.zeros_like(first).index_fill_(-1, torch.tensor([0]), 1e4), y[2]),
        ("zero", torch.zeros_like(first), y[0]),
        ("tiny", 1e-40 * ones, y[0]),
        ("nan", torch.full_like(first, math.nan), y[0]),
        ("one nan", torch.where(torch.arange(first.numel()).view_as(first) == 1, math.nan, first), y[0]),
        ("infinite", torch.full_like(first, math.inf), y[1]),
        ("both infinities", torch.where(ones.cumsum(-1) % 2 == 0, math.inf, -math.inf), y[1]),
        ("label below range", first, torch.tensor(-7)),
        ("label above range", first, torch.tensor(99)),
        ("ignored label", first, torch.tensor(-100)),
    ]
    for label in range(3):
        found.append((f"duplicate with label {label}", first, torch.tensor(label)))
        found.append((f"negative with label {label}", -50 * first, torch.tensor(label)))
    return found


@pytest.mark.parametrize(
    ("kind", "how"), [(k, h) for k in MODELS for h in BOUNDS if k != "residual" or h not in ("l1", "linf")]
)
def test_one_record_moves_the_release_by_at_most_the_sensitivity(kind: str, how: str) -> None:
    make, draw = MODELS[kind]
    x, y = draw(12)
    beta = BOUNDS[how].bias_scale
    b = 8  # public, and not the number of records
    here = private(make(), (x, y), bounds=BOUNDS[how], batch=b, sample_rate=1.0)
    extra = (torch.cat([x, x[:1]]), torch.cat([y, y[:1]]))
    there = private(make(), extra, bounds=BOUNDS[how], batch=b, sample_rate=1.0)
    assert here.batch == there.batch == b
    base = release(here)
    limits = {name: row["sensitivity"] for name, row in there.layers().items()}
    assert limits == {name: row["sensitivity"] for name, row in here.layers().items()}
    largest = 0.0
    for name, record, label in strange_records(x, y):
        extra[0][-1], extra[1][-1] = record, label
        moved = layer_norms(difference(release(there), base), beta)
        ratios = {layer: moved[layer] / limits[layer] for layer in limits}
        # parameters are float32: reading b * (before - after) loses about b ulps
        assert all(r <= 1 + 1e-4 for r in ratios.values()), (name, ratios)
        if how == "joint cap":
            assert math.hypot(*ratios.values()) <= 1 + 1e-4, (name, ratios)
        largest = max(largest, *ratios.values())
    print(f"{kind}, {how}: largest ratio {largest:.3f}")
    assert largest > {"l1": 0.001, "linf": 0.02}.get(how, 0.1)  # the test has teeth


def test_every_record_counts_once_and_order_does_not_matter() -> None:
    x, y = table(10)
    run = private(mlp(), (x, y))
    plain = mlp()
    loss = nn.functional.cross_entropy(plain(x / x.norm(dim=1, keepdim=True).clamp(min=1)), y, reduction="sum")
    loss.backward()
    got = release(run)
    for name, p in plain.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(got[name], p.grad.double(), atol=2e-5, rtol=1e-4)
    turned = private(mlp(), (x.flip(0), y.flip(0)))
    for name, value in release(turned).items():
        torch.testing.assert_close(value, got[name], atol=2e-5, rtol=1e-4)


def test_replacing_records_only_by_invalid_ones_releases_exactly_zero() -> None:
    x = torch.full((5, 6), math.nan)
    y = torch.zeros(5, dtype=torch.long)
    run = private(mlp(), (x, y))
    assert any(v.any() for v in release(run).values())  # a non-finite input is a record of zeros, with its label
    y.fill_(99)
    assert all(not v.any() for v in release(run).values())


def test_named_and_nested_inputs_are_projected_too() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, a: Tensor, scale: Tensor) -> Tensor:
            return self.layer(a + scale)

    x, y = table(4)
    torch.manual_seed(0)
    run = private(Pair(), (1e3 * x, y), example=(x, x), bounds=wc.Bounds(input_radius=0.5))
    for a, label in run:
        run.criterion(run.model(scale=a, a=a), label).backward()
        run.optimizer.step()
    moved = run.model.layer.weight.grad
    assert moved is not None
    sensitivity = run.layers()["layer"]["sensitivity"]
    assert float(moved.norm()) * run.batch <= 4 * sensitivity
    assert sensitivity < 2.1  # sqrt(2) * sqrt(1 + 1): each of the two inputs was taken to lie within 0.5
