"""Whole runs in two worlds: sharp at q = 1, and blind to nothing that matters."""

from __future__ import annotations

import pytest
import torch

from weightclip.audit import subjects, two_worlds
from weightclip.noise._release import Release

JOINT = subjects()["joint cap"]
LOUD = torch.full((1, 4), 3.0), torch.tensor([0])


def test_the_claim_stands_and_is_nearly_attained():
    found = two_worlds(JOINT, LOUD, epsilon_claimed=4.0, steps=3, trials=400)
    assert not found.violation
    assert found.sharpness == pytest.approx(1.0, abs=0.25)
    assert found.white_box.epsilon_lower <= 4.0 and found.black_box.epsilon_gdp <= found.white_box.epsilon_gdp * 1.1


def test_random_draws():
    found = two_worlds(JOINT, LOUD, epsilon_claimed=4.0, rate=0.5, steps=2, trials=30)
    assert not found.violation and found.rate == 0.5


def test_an_unsound_trainer_is_caught(monkeypatch: pytest.MonkeyPatch):
    original = Release.release

    def quieter(self: Release, *args) -> None:
        sigma, self.sigma = self.sigma, self.sigma / 20
        original(self, *args)
        self.sigma = sigma

    monkeypatch.setattr(Release, "release", quieter)
    assert two_worlds(JOINT, LOUD, epsilon_claimed=1.0, steps=2, trials=80).violation
