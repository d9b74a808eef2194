"""Sampled releases of one step: never above the claim, near it with the loudest record."""

from __future__ import annotations

import pytest
import torch

from weightclip.audit import Subject, sampled_releases, subjects
from weightclip.audit._releases import claimed_curve, silent

JOINT = subjects()["joint cap"]
LOUD = torch.full((1, 4), 3.0), torch.tensor([0])


@pytest.mark.parametrize(("epsilon", "trials"), [(1.0, 2500), (8.0, 250)])  # a small epsilon needs many to be seen
def test_the_gaussian_estimate_is_within_a_quarter_of_the_claim(epsilon: float, trials: int):
    found = sampled_releases(JOINT, LOUD, epsilon=epsilon, trials=trials)
    assert not found.violation and found.result.epsilon_lower <= epsilon
    assert found.result.epsilon_gdp == pytest.approx(epsilon, rel=0.25)


def test_random_draws_keep_the_claim():
    found = sampled_releases(JOINT, LOUD, epsilon=2.0, rate=0.2, trials=250)
    assert not found.violation and found.sigma < sampled_releases(JOINT, LOUD, epsilon=2.0, trials=2).sigma


def test_less_noise_than_claimed_is_caught(monkeypatch: pytest.MonkeyPatch):
    start = Subject.start
    monkeypatch.setattr(Subject, "start", lambda self, data, sigma, *a, **k: start(self, data, sigma / 4, *a, **k))
    assert sampled_releases(JOINT, LOUD, epsilon=2.0, trials=250).violation


def test_silent_records_contribute_nothing():
    assert not JOINT.start(silent(JOINT, 3, 0), 0.0).step().any()


def test_claimed_curve_is_the_accountants():
    claim = claimed_curve(1.0, 1.0, 1)
    assert claim(0.0) > claim(1.0) > claim(4.3772) >= 0.99e-5
