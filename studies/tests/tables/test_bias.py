"""The two-point example reproduces the paper's digits, with the sign the paper has wrong; both trainers end there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from weightclip_studies.tables._bias import bias_example, mean_clipped_gradient, plot_bias_example, run_bias_trainers


def test_quadrature_reproduces_the_printed_digits_with_negative_sign() -> None:
    example = bias_example()
    assert f"{example.norm_at_optimum:.4f}" == "0.7791"
    assert tuple(f"{s:.5f}" for s in example.shift) == ("-0.01765", "-0.94221")
    assert example.residual < 1e-10
    # at the printed point, with positive signs, the mean clipped gradient is as large as at the optimum
    assert example.norm_at_printed_shift == pytest.approx(0.7791, abs=1e-4)
    assert example.excess_loss == pytest.approx(0.9045, abs=1e-4)


def test_clipped_mean_at_the_optimum_in_closed_form() -> None:
    """There every gradient is clipped: the mean is 0.8 E[(x, 1) / |(x, 1)|] = 0.8 (sqrt(2) - 1, asinh 1)."""
    expected = 0.8 * np.array([np.sqrt(2) - 1, np.arcsinh(1)])
    np.testing.assert_allclose(bias_example().gradient_at_optimum, expected, atol=1e-12)


@pytest.mark.parametrize("shift", [(0.0, 0.0), (0.3, -0.7), (-1.0, 2.0)])
def test_unclipped_gradient_is_the_papers_formula(shift: tuple[float, float]) -> None:
    u, v = shift
    np.testing.assert_allclose(mean_clipped_gradient(shift, np.inf), [2 * (u / 3 + v / 2), 2 * (u / 2 + v)], atol=1e-10)


def test_quadrature_agrees_with_a_large_sample() -> None:
    rng = np.random.default_rng(1)
    x, e = rng.uniform(size=400_000), np.where(rng.uniform(size=400_000) < 0.1, 9.0, -1.0)
    g = 2 * (0.2 * x - 0.8 - e)[:, None] * np.stack([x, np.ones_like(x)], 1)
    g *= np.minimum(1, 1 / np.linalg.norm(g, axis=1))[:, None]
    np.testing.assert_allclose(mean_clipped_gradient((0.2, -0.8)), g.mean(0), atol=4e-3)


def test_trainers_end_where_quadrature_says() -> None:
    runs = run_bias_trainers(records=20_000)
    assert runs.sample_gradient_norm < 1e-6
    np.testing.assert_allclose(runs.clipped[-1], bias_example().shift, atol=0.06)
    assert (runs.clipped[-1][1] < -0.8) and len(runs.clipped) == 801
    # weight clipping reaches the sample's own least-squares optimum exactly, and that is near (a, b)
    np.testing.assert_allclose(runs.weight_clipped[-1], runs.sample_optimum, atol=1e-6)
    np.testing.assert_allclose(runs.weight_clipped[-1], [0, 0], atol=0.15)


def test_weight_clipping_stops_at_its_ball() -> None:
    runs = run_bias_trainers(records=5_000, steps=400, weight_norm=1.5)  # |(a, b)| = 2.24 is outside
    theta = runs.weight_clipped[-1] + np.array([1.0, 2.0])
    assert np.linalg.norm(theta) == pytest.approx(1.5, rel=1e-9)


def test_plot_is_written(tmp_path: Path) -> None:
    path = plot_bias_example(tmp_path / "bias.png", run_bias_trainers(records=2_000, steps=50))
    assert path.stat().st_size > 20_000
