"""Scales computed from factors are the clipping they stand for, and the curves show the paper's effect."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from weightclip.errors import WeightclipError
from weightclip_studies.tables._clip_error import (
    FactorRadii,
    FlatClip,
    PerLayerClip,
    clipping_error_curve,
    dense_factors,
    plot_clipping_error,
)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def data(n: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    X = 2 * torch.randn(n, 6, generator=g)
    return X, ((X[:, 0] + 0.5 * torch.randn(n, generator=g)) > 1).long()


def cross_entropy(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(z, y, reduction="none")


def by_hand(model: nn.Module, X: torch.Tensor, y: torch.Tensor) -> list[list[torch.Tensor]]:
    """Per record, per layer, the gradient of (W, b) as one flat vector."""
    rows = []
    for x, t in zip(X, y, strict=True):
        g = torch.autograd.grad(cross_entropy(model(x[None]), t[None]).sum(), list(model.parameters()))
        rows.append([torch.cat([g[0].flatten(), g[1]]), torch.cat([g[2].flatten(), g[3]])])
    return rows


def test_scales_are_per_layer_and_flat_clipping() -> None:
    torch.manual_seed(0)
    model, (X, y) = network(), data(30)
    factors, _ = dense_factors(model, X, y, cross_entropy)
    per_layer, flat = PerLayerClip(0.4).scales(factors), FlatClip(0.4).scales(factors)
    sizes = torch.tensor([[float(g.norm()) for g in row] for row in by_hand(model, X, y)])
    for k in range(2):
        torch.testing.assert_close(per_layer[k], (0.4 / sizes[:, k]).clamp_max(1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(flat[k], (0.4 / sizes.norm(dim=1)).clamp_max(1), rtol=1e-4, atol=1e-5)
    assert 0 < (per_layer[0] < 1).sum() < 30


def test_factor_radii_bound_every_record() -> None:
    torch.manual_seed(0)
    model, (X, y) = network(), data(50)
    factors, _ = dense_factors(model, X * 10, y, cross_entropy)
    rule = FactorRadii(input_radius=1.5, cotangent_radius=0.2, bias_scale=0.5)
    total = torch.zeros(50)
    for (delta, x), s in zip(factors, rule.scales(factors), strict=True):
        size = s * delta.norm(dim=1) * (x.square().sum(1) + 0.25).sqrt()
        assert float(size.max()) <= 0.3 * (1 + 1e-5)
        total += size.square()
    assert float(total.max().sqrt()) <= rule.sensitivity(2) * (1 + 1e-5)
    # the formula, record by record
    delta, x = factors[0]
    pairs = [(float(d.norm()), math.hypot(float(a.norm()), 0.5)) for d, a in zip(delta, x, strict=True)]
    expected = torch.tensor([min(1, 1.5 / a) * min(1, 0.2 / d) for d, a in pairs])
    torch.testing.assert_close(rule.scales(factors)[0], expected, rtol=1e-4, atol=1e-6)


def test_curve_matches_gradients_by_hand() -> None:
    X, y = data(40)
    curve = clipping_error_curve(X, y, network, 0.3, steps=1, records=40)
    torch.manual_seed(0)
    rows = by_hand(network(), X, y)
    mean = [torch.stack([row[k] for row in rows]).mean(0) for k in range(2)]
    kept = [torch.stack([row[k] * min(1, 0.3 / float(row[k].norm())) for row in rows]).mean(0) for k in range(2)]
    for k in range(2):
        assert curve.layer_error[0, k] == pytest.approx(float((mean[k] - kept[k]).norm()), rel=1e-3)
    assert curve.clipped_norm[0] == pytest.approx(float(torch.cat(kept).norm()), rel=1e-3)
    assert curve.true_norm[0] == pytest.approx(float(torch.cat(mean).norm()), rel=1e-3)
    assert curve.sensitivity == pytest.approx(0.3 * math.sqrt(2))


def test_the_papers_effect_and_its_absence() -> None:
    """With clipping the update shrinks and the error outgrows it; with nothing clipped there is no error at all."""
    X, y = data()
    clipped = clipping_error_curve(X, y, network, 0.2, steps=120, records=200, batch_size=100)
    assert clipped.clipped_norm[-20:].mean() < 0.5 * clipped.clipped_norm[:5].mean()
    assert clipped.error[-20:].mean() > 2 * clipped.clipped_norm[-20:].mean()
    free = clipping_error_curve(X, y, network, FactorRadii(1e6, math.inf), steps=5, batch_size=100)
    assert np.all(free.error < 1e-6) and np.all(free.fraction == 0) and free.sensitivity == math.inf


def test_plain_functions_and_noise() -> None:
    X, y = data(100)
    half = clipping_error_curve(X, y, network, lambda delta, x: torch.full((len(x),), 0.5), steps=2, records=100)
    np.testing.assert_allclose(half.error, half.true_norm / 2, rtol=1e-5)
    with pytest.raises(WeightclipError, match="no finite sensitivity"):
        clipping_error_curve(X, y, network, lambda delta, x: delta[:, 0], steps=1, noise_multiplier=1.0)
    quiet, noisy = (clipping_error_curve(X, y, network, 1.0, steps=3, noise_multiplier=s).loss for s in (0.0, 5.0))
    assert quiet[0] == noisy[0] and quiet[2] != noisy[2]


def test_networks_with_other_parameters_are_refused() -> None:
    with pytest.raises(WeightclipError, match="nn.Linear"):
        clipping_error_curve(*data(), lambda: nn.Sequential(nn.Linear(6, 2), nn.LayerNorm(2)), 1.0, steps=1)


def test_plot_is_written(tmp_path: Path) -> None:
    X, y = data(100)
    curves = {
        "Blobs": {
            "per-layer clipping, C = 0.3": clipping_error_curve(X, y, network, 0.3, steps=5),
            "factor radii": clipping_error_curve(X, y, network, FactorRadii(2.0, 0.3), steps=5),
        }
    }
    assert plot_clipping_error(tmp_path / "clip.png", curves).stat().st_size > 10_000
