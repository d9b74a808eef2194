"""Measured factors and gradients against what the engine certifies, over training."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import weightclip as wc
from weightclip_studies.tables._tightness import plot_tightness, tightness


def test_no_bound_is_exceeded(tmp_path: Path):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 6))
    X[:30] *= 20
    y = (X[:, 0] > 0).astype(np.int64)
    weights = tightness(X, y, wc.Bounds(weight_norm=1.5, input_radius=2.0, bias_scale=0.5), width=8, epochs=2)
    slack = 1 + 1e-5
    assert (weights.input_max <= weights.input_bound * slack).all()
    assert (weights.cotangent_max <= weights.cotangent_bound * slack).all()
    assert (weights.gradient_max <= weights.sensitivity * slack).all()
    bounds = wc.Bounds(
        input_radius=2.0, layer_radius={"layers.2": 0.5}, cotangent_radius={"layers.0": 0.1, "layers.2": 0.3}
    )
    factors = tightness(X, y, bounds, width=8, epochs=2)
    assert (factors.gradient_max <= factors.sensitivity * slack).all()
    assert (factors.gradient_max > 0.5 * factors.sensitivity).any()  # near: the bound is not idle
    assert plot_tightness(tmp_path / "t.png", {"a": weights, "b": factors}).exists()
