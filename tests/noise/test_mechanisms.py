"""Allocations keep the joint budget exactly; the K-norm mechanism has the density it claims."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from weightclip.errors import WeightclipError
from weightclip.noise._mechanisms import (
    AdamAware,
    Allocation,
    Equal,
    Global,
    KNormMechanism,
    LeastVariance,
    Weighted,
    combine,
    floored,
    joint_multiplier,
    quantile_adjusted_sigma,
    round_release_,
    rounded_sensitivity,
)

layers = st.lists(
    st.tuples(st.one_of(st.just(0.0), st.floats(1e-9, 1e9)), st.integers(1, 10**8), st.floats(1e-3, 1e3)),
    min_size=1,
    max_size=12,
)


def allocations(weights: tuple[float, ...]) -> list[Allocation]:
    return [Equal(), LeastVariance(), AdamAware(), Global(), Weighted(weights)]


@settings(max_examples=60, deadline=None)
@given(layers, st.floats(1e-3, 1e3))
def test_every_allocation_spends_the_budget_exactly(rows: list[tuple[float, int, float]], sigma: float) -> None:
    delta = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    dims = [row[1] for row in rows]
    for allocation in allocations(tuple(row[2] for row in rows)):
        s = allocation.scales(delta, dims, sigma)
        assert s.dtype == torch.float64 and bool((s > 0).all())
        spent = math.fsum((floored(delta) / s).square().tolist())
        assert spent == pytest.approx(sigma**-2, rel=1e-12)
        assert float(joint_multiplier(delta, s)) == pytest.approx(sigma, rel=1e-12)
        # what the bounds themselves spend is never more
        assert float((delta / s).square().sum()) <= sigma**-2 * (1 + 1e-12)


def test_closed_forms() -> None:
    delta, dims, sigma = torch.tensor([0.5, 2.0, 1.0]).double(), [10, 1000, 40], 1.5
    d = torch.tensor(dims).double()
    k = len(dims)
    close = {"rtol": 1e-12, "atol": 0.0}
    torch.testing.assert_close(Equal().scales(delta, dims, sigma), sigma * math.sqrt(k) * delta, **close)
    adam = sigma * delta * torch.sqrt(d.sqrt().sum() / d.sqrt())
    torch.testing.assert_close(AdamAware().scales(delta, dims, sigma), adam, **close)
    least = sigma * torch.sqrt(delta / d.sqrt() * (delta * d.sqrt()).sum())
    torch.testing.assert_close(LeastVariance().scales(delta, dims, sigma), least, **close)
    everywhere = sigma * delta.square().sum().sqrt() * torch.ones(k).double()
    torch.testing.assert_close(Global().scales(delta, dims, sigma), everywhere, **close)


@settings(max_examples=40, deadline=None)
@given(layers, st.integers(0, 2**31))
def test_weighted_allocation_is_optimal(rows: list[tuple[float, int, float]], seed: int) -> None:
    delta = floored(torch.tensor([row[0] for row in rows], dtype=torch.float64))
    dims = [row[1] for row in rows]
    w = torch.tensor([row[2] for row in rows], dtype=torch.float64)
    cost = w * torch.tensor(dims).double()
    best = Weighted(tuple(w.tolist())).scales(delta, dims, 1.0)
    # any other way to spend the same budget: shares drawn at random
    shares = torch.rand(len(rows), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 1e-3
    other = delta / (shares / shares.sum()).sqrt()
    assert float((cost * best.square()).sum()) <= float((cost * other.square()).sum()) * (1 + 1e-9)


def test_sigma_zero_no_layers_and_bad_input() -> None:
    delta = torch.tensor([1.0, 0.0])
    assert Equal().scales(delta, [3, 4], 0.0).tolist() == [0.0, 0.0]
    assert float(joint_multiplier(delta, torch.zeros(2))) == 0.0
    assert float(joint_multiplier(delta, torch.tensor([1.0, 0.0]))) == 0.0  # one bare layer is no privacy
    assert Equal().scales(torch.zeros(0), [], 1.0).numel() == 0
    for sigma in (-1.0, math.nan, math.inf):
        with pytest.raises(WeightclipError, match="noise multiplier"):
            Equal().scales(delta, [3, 4], sigma)
    with pytest.raises(WeightclipError, match="parameter counts"):
        Equal().scales(delta, [3], 1.0)
    with pytest.raises(WeightclipError, match="weights for"):
        Weighted((1.0,)).scales(delta, [3, 4], 1.0)
    with pytest.raises(WeightclipError, match="positive"):
        Weighted((1.0, 0.0))


def test_a_zero_bound_still_gets_noise() -> None:
    for delta in (torch.tensor([0.0, 1.0]), torch.zeros(2)):
        for allocation in allocations((1.0, 1.0)):
            assert float(allocation.scales(delta, [5, 5], 1.0).min()) > 0


def test_naive_layerwise_noise_has_multiplier_sigma_over_root_k() -> None:
    delta = torch.rand(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    assert float(joint_multiplier(delta, 1.0 * delta)) == pytest.approx(0.5, rel=1e-12)


def test_combine() -> None:
    assert combine([2.0]) == 2.0
    assert combine([1.0] * 4) == pytest.approx(0.5)
    assert combine([3.0, math.inf]) == pytest.approx(3.0)
    assert combine([]) == math.inf
    assert combine([1.0, 0.0]) == 0.0
    with pytest.raises(WeightclipError, match="combine"):
        combine([-1.0])


def test_quantile_adjustment() -> None:
    z = quantile_adjusted_sigma(1.0, 4, 256 / 20)
    assert z == pytest.approx(1.003, abs=2e-4)  # the figure of SOUNDNESS section 4
    assert combine([z] + [2 * 256 / 20] * 4) == pytest.approx(1.0, rel=1e-12)
    assert quantile_adjusted_sigma(1.3, 0, 0.0) == 1.3
    for sigma_b in (1.0, 0.0):  # exactly the whole budget, and a query without noise
        with pytest.raises(WeightclipError, match="quantile queries"):
            quantile_adjusted_sigma(1.0, 4, sigma_b)


# K-norm mechanism


@pytest.mark.parametrize("p", [1, 2, math.inf])
@pytest.mark.parametrize("d", [1, 2, 7])
def test_unit_ball_is_sampled_uniformly(p: float, d: int) -> None:
    rng = np.random.default_rng(4)
    mechanism = KNormMechanism(p, 1.0)
    u = np.stack([mechanism._unit_ball(d, rng) for _ in range(4000)])
    norms = np.linalg.norm(u, p, axis=1)
    assert norms.max() <= 1 + 1e-12
    assert stats.kstest(norms**d, "uniform").pvalue > 1e-5  # P(norm <= t) = t^d
    assert np.abs(u.mean(0)).max() < 5 * u.std() / math.sqrt(len(u))
    if d == 2:  # the share of a sub-region equals its area: the part of the ball where |x| > |y|, and a small disc
        assert np.mean(np.abs(u[:, 0]) > np.abs(u[:, 1])) == pytest.approx(0.5, abs=0.04)
        area = {1: 2.0, 2: math.pi, math.inf: 4.0}[p]
        inside = np.mean(np.linalg.norm(u - np.array([0.3, 0.2]), axis=1) < 0.3)
        assert inside == pytest.approx(math.pi * 0.09 / area, abs=0.03)


@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_one_dimension_is_the_laplace_mechanism(p: float) -> None:
    rng = np.random.default_rng(8)
    mechanism, delta = KNormMechanism(p, 0.7), torch.tensor([2.5])
    x = np.array([mechanism.sample(delta, [1], rng)[0][0] for _ in range(8000)])
    assert stats.kstest(x, stats.laplace(scale=2.5 / 0.7).cdf).pvalue > 1e-5


@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_joint_norm_has_the_law_of_its_density(p: float) -> None:
    """The density exp(-eps ||x||) in D dimensions gives ||x|| ~ Gamma(D, 1/eps), over all layers together."""
    rng = np.random.default_rng(5)
    mechanism, delta, dims = KNormMechanism(p, 1.3), torch.tensor([0.2, 5.0, 1.0]), [2, 1, 4]
    draws = [mechanism.sample(delta, dims, rng) for _ in range(5000)]
    norms = [mechanism.norm(x, delta) for x in draws]
    assert stats.kstest(norms, stats.gamma(sum(dims), scale=1 / 1.3).cdf).pvalue > 1e-5
    # the maximum is attained in layer k with probability d_k / D
    ratio = np.array([[np.linalg.norm(b, p) / float(r) for b, r in zip(x, delta, strict=True)] for x in draws])
    shares = np.bincount(ratio.argmax(1), minlength=3) / len(draws)
    np.testing.assert_allclose(shares, np.array(dims) / sum(dims), atol=0.035)


def test_two_dimensional_density_ratio_is_bounded_by_exp_epsilon() -> None:
    """Two layers of one number each: histogram against exp(-eps max|x_k|/Delta_k), and the privacy ratio."""
    eps, delta, n = 1.0, torch.tensor([1.0, 2.0]), 60_000
    rng = np.random.default_rng(6)
    mechanism = KNormMechanism(2, eps)
    x = np.array([np.concatenate(mechanism.sample(delta, [1, 1], rng)) for _ in range(n)])
    edges = [np.linspace(-3, 3, 7), np.linspace(-6, 6, 7)]
    counts, _, _ = np.histogram2d(x[:, 0], x[:, 1], bins=edges)
    shifted, _, _ = np.histogram2d(x[:, 0] + 1.0, x[:, 1] - 2.0, bins=edges)  # the worst neighbour
    fine = [np.linspace(e[0], e[-1], 241) for e in edges]
    mid = [0.5 * (f[1:] + f[:-1]) for f in fine]
    grid = np.exp(-eps * np.maximum(np.abs(mid[0])[:, None], np.abs(mid[1])[None] / 2))
    volume = math.prod(2 * float(r) for r in delta) * math.factorial(2) / eps**2  # integral of the density
    cell = (mid[0][1] - mid[0][0]) * (mid[1][1] - mid[1][0])
    expected = grid.reshape(6, 40, 6, 40).sum((1, 3)) * cell / volume * n
    assert np.abs(counts - expected).max() < 5 * math.sqrt(expected.max())
    np.testing.assert_allclose(counts, expected, atol=5 * math.sqrt(expected.max()))
    slack = 1 + 5 / np.sqrt(np.minimum(counts, shifted))
    assert (np.maximum(counts / shifted, shifted / counts) <= math.exp(eps) * slack).all()


def test_k_norm_refuses_nonsense() -> None:
    with pytest.raises(WeightclipError, match="p must be"):
        KNormMechanism(3, 1.0)
    with pytest.raises(WeightclipError, match="epsilon0"):
        KNormMechanism(2, 0.0)


def test_k_norm_is_dear_in_high_dimension() -> None:
    """l_inf, d = 1000, epsilon0 = 1: about 578 Delta per coordinate (SOUNDNESS section 3)."""
    rng = np.random.default_rng(1)
    x = np.stack([KNormMechanism(math.inf, 1.0).sample(torch.ones(1), [1000], rng)[0] for _ in range(50)])
    assert math.sqrt(np.mean(x**2)) == pytest.approx(578, rel=0.03)


# rounding


def test_rounding_a_release() -> None:
    x = torch.tensor([0.26, -0.9, 3.0])
    assert round_release_(x, 0.5).tolist() == [0.5, -1.0, 3.0]
    with pytest.raises(WeightclipError, match="grid"):
        round_release_(x, 0.0)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 50), st.floats(1e-3, 10.0))
def test_rounding_before_the_noise_stays_within_the_documented_sensitivity(seed: int, n: int, grid: float) -> None:
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(n, generator=g, dtype=torch.float64)
    step = torch.randn(n, generator=g, dtype=torch.float64)
    b = a + step
    moved = float((round_release_(a, grid) - round_release_(b, grid)).norm())
    assert moved <= rounded_sensitivity(float(step.norm()), grid, n) * (1 + 1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_allocation_never_waits_for_the_device() -> None:
    delta, dims = torch.tensor([1.0, 0.0, 3.0], device="cuda"), [1000, 10, 70]
    for step in range(2):
        for allocation in allocations((1.0, 2.0, 3.0)):
            if step == 1:
                torch.cuda.set_sync_debug_mode("error")
            try:
                scales = allocation.scales(delta, dims, 1.5)
                multiplier = joint_multiplier(delta, scales)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert float(multiplier) == pytest.approx(1.5, rel=1e-9)
