"""Bounds from one run: against exact binomials, simulation, and each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from weightclip.accounting._accounting import gdp_delta, gdp_epsilon
from weightclip.audit import Subject, one_run
from weightclip.audit._one_run import (
    _guess,
    _largest,
    canary_subject,
    curve_inverse,
    gaussian_inverse,
    judge,
    refuted,
    steinke_p_value,
)


def test_p_value_without_delta_is_the_binomial_tail():
    for epsilon in (0.0, 1.0, 3.0):
        expected = stats.binom.sf(69, 100, 1 / (1 + math.exp(-epsilon)))
        assert steinke_p_value(500, 100, 70, epsilon, 0.0) == pytest.approx(expected)


def test_p_value_pays_for_delta_and_falls_with_correct_guesses():
    assert steinke_p_value(500, 100, 90, 1.0, 1e-3) > steinke_p_value(500, 100, 90, 1.0, 0.0)
    values = [steinke_p_value(500, 100, c, 1.0, 1e-5) for c in range(50, 101, 10)]
    assert values == sorted(values, reverse=True)


def test_curve_inverse_is_the_gaussian_one():
    fine = np.linspace(0, 25, 2000)
    from_curve, exact = curve_inverse(lambda e: gdp_delta(1.3, e), list(fine)), gaussian_inverse(1.3)
    for rate in (0.01, 0.2, 0.5, 0.9, 0.999):
        assert from_curve(rate) == pytest.approx(exact(rate), abs=2e-3)
        assert from_curve(rate) <= exact(rate) + 1e-12  # never claims more than the curve says


def _simulate(mu: float, m: int, each: int, rng: np.random.Generator) -> tuple[int, int]:
    present = rng.random(m) < 0.5
    return _guess(rng.standard_normal(m) + mu * present, present, each)


@pytest.mark.parametrize(("mu", "each"), [(0.5, 40), (2.0, 15)])
def test_true_curves_are_hardly_ever_refuted(mu: float, each: int):
    rng = np.random.default_rng(0)
    delta = 1e-5
    epsilon = gdp_epsilon(mu, delta)
    found = [_simulate(mu, 300, each, rng) for _ in range(60)]
    assert sum(refuted(gaussian_inverse(mu), 300, *f, 0.05) for f in found) <= 6
    assert sum(steinke_p_value(300, *f, epsilon, delta) <= 0.05 for f in found) <= 6


def test_the_refined_bound_is_stronger():
    rng = np.random.default_rng(1)
    found = _simulate(3.0, 2000, 100, rng)
    plain = _largest(lambda e: steinke_p_value(2000, *found, e, 1e-5) <= 0.05, 60.0)
    refined = gdp_epsilon(_largest(lambda mu: refuted(gaussian_inverse(mu), 2000, *found, 0.05), 30.0), 1e-5)
    assert 0 < plain < refined < gdp_epsilon(3.0, 1e-5)


def test_judge_refutes_a_false_claim():
    rng = np.random.default_rng(2)
    present = rng.random(2000) < 0.5
    scores = rng.standard_normal(2000) + 4.0 * present
    assert judge(scores, present, lambda e: gdp_delta(0.5, e), 1.0, 1e-5, 1.0, 1).violation
    assert not judge(scores, present, lambda e: gdp_delta(4.0, e), 1.0, 1e-5, 1.0, 1).violation


def test_engine_keeps_its_claim_and_the_estimate_is_sharp():
    found = one_run(epsilon_claimed=8.0, canaries=600, seed=1)
    assert not found.violation
    assert 1.0 < found.epsilon_lower <= 8.0 and 2.0 < found.epsilon_lower_fdp <= 8.0
    assert found.epsilon_gdp == pytest.approx(8.0, rel=0.25)


def test_engine_with_a_tenth_of_the_noise_is_caught(monkeypatch: pytest.MonkeyPatch):
    start = Subject.start
    monkeypatch.setattr(Subject, "start", lambda self, data, sigma, *a, **k: start(self, data, sigma / 10, *a, **k))
    assert one_run(epsilon_claimed=1.0, canaries=400).violation


def test_canaries_are_orthogonal():
    run = canary_subject(6).start((torch.eye(6)[:3], torch.tensor([0, 1, 0])), 0.0)
    columns = run.step().view(2, 6)
    assert (columns[:, :3].norm(dim=0) > 0.99).all() and not columns[:, 3:].any()
