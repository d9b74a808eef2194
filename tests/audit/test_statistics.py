"""Clopper-Pearson bounds, two-world comparison and the tests of noise, against laws that are known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from weightclip.accounting._accounting import gdp_delta, gdp_epsilon
from weightclip.audit._statistics import check_normal, clopper_pearson, compare


@pytest.mark.parametrize(("k", "n"), [(0, 10), (3, 10), (10, 10), (17, 1000)])
def test_clopper_pearson_inverts_the_binomial_tails(k: int, n: int):
    low, high = clopper_pearson(k, n, 0.025)
    assert stats.binom.sf(k - 1, n, low) == pytest.approx(0.025 if k else 1.0)
    assert stats.binom.cdf(k, n, high) == pytest.approx(0.025 if k < n else 1.0)


def _worlds(mu: float, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(n), mu + rng.standard_normal(n)


def test_lower_bound_holds_and_is_near_the_truth():
    mu, delta = 2.0, 1e-5
    truth = gdp_epsilon(mu, delta)
    found = [compare(*_worlds(mu, 2000, seed), delta) for seed in range(40)]
    assert sum(f.epsilon_lower > truth for f in found) <= 5  # at most 5% are expected
    assert np.median([f.mu_lower for f in found]) > 0.85 * mu
    assert sum(f.mu_lower > mu for f in found) <= 5
    assert np.median([f.epsilon_gdp for f in found]) == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize("seed", range(10))
def test_a_true_claim_is_not_refuted_even_when_attained(seed: int):
    found = compare(*_worlds(1.0, 4000, seed), 1e-5, lambda e: gdp_delta(1.0, e))
    assert not found.violation and found.excess < 0


@pytest.mark.parametrize(("mu", "claimed"), [(1.5, 1.0), (5.0, 4.0), (0.3, 0.0)])
def test_a_false_claim_is_refuted(mu: float, claimed: float):
    assert compare(*_worlds(mu, 20_000, 0), 1e-5, lambda e: gdp_delta(claimed, e)).violation


def test_either_direction_refutes():
    # half of the time the score is one that the other world never shows: one inequality sees it, then the other
    rng = np.random.default_rng(0)
    without, with_it = rng.standard_normal(4000), np.where(rng.random(4000) < 0.5, 9.0, rng.standard_normal(4000))
    assert compare(without, with_it, 1e-5, lambda e: gdp_delta(0.5, e)).violation
    assert compare(-with_it, -without, 1e-5, lambda e: gdp_delta(0.5, e)).violation


def test_scores_that_are_not_finite_tell_the_worlds_apart():
    found = compare(np.zeros(1000), np.full(1000, np.nan), 1e-5, lambda e: gdp_delta(1.0, e))
    assert found.violation and found.epsilon_lower > 3


def test_noise_of_the_stated_law_passes():
    assert not any(check_normal(np.random.default_rng(s).standard_normal(20_000, dtype=np.float32)).suspicious
                   for s in range(20))  # fmt: skip


@pytest.mark.parametrize("n", [4000, 20_000])
def test_noise_of_another_law_does_not(n: int):
    rng = np.random.default_rng(1)
    z = rng.standard_normal(n)
    assert check_normal(1.1 * z).why == "spread"
    assert check_normal(rng.uniform(-(3**0.5), 3**0.5, n)).why == "shape"
    assert check_normal(np.round(z * 64) / 64).why == "resolution"
    assert check_normal(np.full(n, np.nan)).suspicious
    assert check_normal(1.1 * z).scale == pytest.approx(1.1, rel=0.05)
